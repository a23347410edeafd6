"""The embedding of images as tokens: patches and positions.

Letters: B images, M tokens, D width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from softmoe.moe.experts import lecun_normal_, normal_


class PatchConv(nn.Conv2d):
    """A convolution whose windows do not overlap. It draws its weights itself, as XavierLinear does."""

    built = False

    def __init__(self, patch_size: int, dim: int):
        super().__init__(3, dim, kernel_size=patch_size, stride=patch_size)
        self.built = True

    def reset_parameters(self) -> None:
        if not self.built:
            super().reset_parameters()
            return
        lecun_normal_(self.weight, fan_in=self.weight[0].numel())
        assert self.bias is not None
        nn.init.zeros_(self.bias)


class PatchEmbed(nn.Module):
    """Projects each patch to a token, row by row, (B, 3, height, width) -> (B, M, D).

    Pixels beyond the last whole patch are dropped.
    """

    def __init__(self, patch_size: int, dim: int):
        super().__init__()
        self.patch_size = patch_size
        self.proj = PatchConv(patch_size, dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.proj.reset_parameters()

    def grid(self, height: int, width: int) -> tuple[int, int]:
        rows, columns = height // self.patch_size, width // self.patch_size
        if rows < 1 or columns < 1:
            raise ValueError(f"image of {height} x {width} is smaller than one patch of {self.patch_size} pixels")
        return rows, columns

    def forward(self, images: Tensor) -> Tensor:
        # contiguous: sums keep the layout of their first term, so otherwise every norm would copy the tokens
        return self.proj(images).flatten(2).transpose(1, 2).contiguous()


def unseen_pixels(sides: tuple[int, int], patch: int) -> list[str]:
    """Say which pixels of an image, beyond the last whole patch, the model does not see, and which sizes are whole."""
    names = ("height and width",) if sides[0] == sides[1] else ("height", "width")
    return [
        f"the last {side % patch} of the {side} pixels of the {name} are not seen, since patches have {patch} a side; "
        f"{side - side % patch} and {side - side % patch + patch} are whole"
        for name, side in zip(names, sides, strict=False)
        if side % patch
    ]


class LearnedPositions(nn.Module):
    """A learned vector per patch, resampled to any grid, and one per prefix token (class token, registers)."""

    def __init__(self, grid: tuple[int, int], dim: int, prefix: int = 0):
        super().__init__()
        self.grid, self.prefix = grid, prefix
        self.table = nn.Parameter(torch.empty(1, prefix + grid[0] * grid[1], dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        normal_(self.table, std=0.02)

    def forward(self, grid: tuple[int, int]) -> Tensor:
        if grid == self.grid:
            return self.table
        prefix, cells = self.table[:, : self.prefix], self.table[:, self.prefix :]
        return torch.cat([prefix, resample(cells, self.grid, grid)], dim=1)


class SinCosPositions(nn.Module):
    """Fixed two-dimensional sines and cosines (MoCo v3), computed for any grid; zero for prefix tokens."""

    def __init__(self, grid: tuple[int, int], dim: int, prefix: int = 0):
        super().__init__()
        if dim % 4 or dim < 8:
            raise ValueError(f"sincos positions need a width that is a multiple of 4 and at least 8, got {dim}")
        self.grid, self.dim, self.prefix = grid, dim, prefix
        self.table: Tensor
        self.register_buffer("table", self.make(grid), persistent=False)

    def make(self, grid: tuple[int, int]) -> Tensor:
        table = sincos_table(grid, self.dim)
        return torch.cat([table.new_zeros(1, self.prefix, self.dim), table], dim=1)

    def reset_parameters(self) -> None:
        """Fill the table again, after the module was built on the meta device."""
        self.table.copy_(self.make(self.grid))

    def forward(self, grid: tuple[int, int]) -> Tensor:
        return self.table if grid == self.grid else self.make(grid).to(self.table)


def sincos_table(grid: tuple[int, int], dim: int, temperature: float = 10_000.0) -> Tensor:
    """Return (1, rows * columns, dim): sine and cosine of the column, then of the row, at dim/4 frequencies each."""
    rows, columns = grid
    omega = temperature ** -(torch.arange(dim // 4, dtype=torch.float64) / (dim // 4 - 1))
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    x_angles, y_angles = x.flatten()[:, None] * omega, y.flatten()[:, None] * omega
    table = torch.cat([x_angles.sin(), x_angles.cos(), y_angles.sin(), y_angles.cos()], dim=1)
    return table.to(torch.get_default_dtype()).unsqueeze(0)


def resample(table_1MD: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Interpolate positions to another grid bilinearly with aligned corners, as the reference does."""
    image = table_1MD.unflatten(1, old).permute(0, 3, 1, 2)
    image = F.interpolate(image, size=new, mode="bilinear", align_corners=True)
    return image.flatten(2).transpose(1, 2)
