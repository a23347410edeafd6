"""Patches and positions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from softmoe.models.embed import LearnedPositions, PatchEmbed, SinCosPositions, resample


@given(*[st.integers(1, 4)] * 3)
def test_patches_row_by_row(rows, columns, extra):
    """Token r * columns + c is the patch at row r and column c; pixels beyond the last whole patch do not matter."""
    embed = PatchEmbed(5, 8).double()
    images = torch.randn(2, 3, 5 * rows + extra, 5 * columns + extra, dtype=torch.float64)
    tokens = embed(images)
    assert embed.grid(*images.shape[2:]) == (rows, columns)
    assert tokens.shape == (2, rows * columns, 8)
    for r, c in np.ndindex(rows, columns):
        patch = images[:, :, 5 * r : 5 * r + 5, 5 * c : 5 * c + 5]
        torch.testing.assert_close(tokens[:, r * columns + c], embed(patch)[:, 0])


@pytest.mark.parametrize("grid", [(1, 1), (2, 3), (4, 4)])
@pytest.mark.parametrize("dim", [8, 12, 32])
def test_sincos_values(grid, dim):
    """sin and cos of the column, then of the row, at frequencies 10000^(-i / (D/4 - 1))."""
    table = SinCosPositions(grid, dim, prefix=1)(grid)
    assert table.shape == (1, 1 + grid[0] * grid[1], dim)
    assert table[0, 0].abs().max() == 0
    quarter = dim // 4
    for row, column in np.ndindex(*grid):
        found = table[0, 1 + row * grid[1] + column].tolist()
        omega = [10_000 ** (-i / (quarter - 1)) for i in range(quarter)]
        expected = [
            *(math.sin(column * w) for w in omega),
            *(math.cos(column * w) for w in omega),
            *(math.sin(row * w) for w in omega),
            *(math.cos(row * w) for w in omega),
        ]
        assert found == pytest.approx(expected, abs=1e-6)


def test_sincos_for_another_grid_is_made_anew():
    """Not interpolated: the values of the new grid, in the dtype of the model."""
    positions = SinCosPositions((2, 2), 8).double()
    found = positions((3, 5))
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.float(), SinCosPositions((3, 5), 8)((3, 5)))


def test_sincos_may_be_built_without_storage():
    """A model built on meta gets its table when its parameters are reset."""
    with torch.device("meta"):
        positions = SinCosPositions((2, 3), 8)
    positions.to_empty(device="cpu")
    positions.reset_parameters()
    assert torch.equal(positions.table, SinCosPositions((2, 3), 8).table)


@given(*[st.integers(1, 6)] * 4)
def test_resampling_is_linear_with_aligned_corners(old_rows, old_columns, rows, columns):
    """Against the plain formula: new cell i of n lies at i (old - 1) / (n - 1) of the old grid."""
    table = torch.randn(1, old_rows * old_columns, 2, dtype=torch.float64)
    image = table[0].view(old_rows, old_columns, 2).numpy()
    found = resample(table, (old_rows, old_columns), (rows, columns))[0].view(rows, columns, 2).numpy()

    def place(index: int, new: int, old: int) -> tuple[int, int, float]:
        exact = index * (old - 1) / (new - 1) if new > 1 else 0.0
        low = min(int(exact + 1e-9), old - 1)
        return low, min(low + 1, old - 1), exact - low

    for r, c in np.ndindex(rows, columns):
        top, bottom, down = place(r, rows, old_rows)
        left, right, across = place(c, columns, old_columns)
        upper = (1 - across) * image[top, left] + across * image[top, right]
        lower = (1 - across) * image[bottom, left] + across * image[bottom, right]
        np.testing.assert_allclose(found[r, c], (1 - down) * upper + down * lower, atol=1e-9)


def test_learned_positions_keep_the_class_token():
    """The row of the class token is not resampled; the same grid gives the table itself."""
    positions = LearnedPositions((2, 2), 4, prefix=1)
    assert positions((2, 2)) is positions.table
    larger = positions((3, 5))
    assert larger.shape == (1, 16, 4)
    assert torch.equal(larger[:, 0], positions.table[:, 0])
    assert torch.equal(larger[0, [1, 5, 11, 15]], positions.table[0, 1:])  # the corners stay


@pytest.mark.parametrize("dim", [4, 10, 6])
def test_sincos_needs_a_fitting_width(dim):
    """A width that does not split into four is refused."""
    with pytest.raises(ValueError, match=f"multiple of 4 and at least 8, got {dim}"):
        SinCosPositions((2, 2), dim)
