"""Figures for every kind of router, and a clear word where matplotlib is missing."""

import sys

import numpy as np
import pytest
from drawings import ink, keep_figures, points
from making import inspection, tiny_model

from softmoe.inspection import plots
from softmoe.inspection.page import layers_text, write_inspection

DENSE = {"contributions", "slot_images", "cumulative_dispatch", "cumulative_combine", "slot_correlation", "collapse"}


@pytest.mark.parametrize(
    ("router", "names"),
    [
        ("soft", DENSE),
        ("uniform", DENSE - {"slot_correlation"}),
        ("tokens_choice", {"slot_images", "dropping"}),
        ("identity", {"slot_images", "dropping"}),
    ],
)
def test_figures(router, names, tmp_path, monkeypatch):
    """Each router gets the figures that mean something for it, as PNG and SVG, and no panel that is used is empty."""
    kept = keep_figures(monkeypatch)
    drawn = plots.write_figures(inspection(tiny_model(router), router), tmp_path)
    assert {path.stem for path in tmp_path.glob("*.png")} == {path.stem for path in tmp_path.glob("*.svg")} == names
    assert len(drawn) == len(names)
    for path in tmp_path.glob("*.png"):
        panels = [axis for axis in kept[path.name].axes if axis.axison or axis.images]
        assert panels
        assert all(len(points(axis)) for axis in panels), path.stem
        assert all(ink(path, axis) > 0.001 for axis in panels), path.stem


def test_scales_that_are_alike_look_alike():
    """The axis of the scale begins at 0: what differs by a hundredth is no slope."""
    axis = plots.collapse(inspection(tiny_model("soft"), "soft")).axes[-1]
    low, high = axis.get_ylim()
    assert axis.get_ylabel() == "scale of the logits"
    assert low <= 0 < max(axis.lines[0].get_ydata()) < high


def test_shading():
    """The heaviest patch keeps its brightness, others darken by their share; a class token has no place."""
    pixels = np.full((4, 8, 3), 200, dtype=np.uint8)
    weights = np.array([9.0, 1.0, 0.5, 0.0, 0.25])
    shaded = plots.shaded(pixels, weights, (1, 4))
    expected = 200 * (0.06 + 0.94 * np.array([1, 0.5, 0, 0.25]))
    assert shaded[0, ::2, 0] == pytest.approx(expected, abs=1)
    assert np.array_equal(shaded[:, ::2], shaded[:, 1::2])


def test_without_matplotlib(tmp_path, monkeypatch):
    """The page and the numbers are written; asking for a figure says which extra to install."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    model = inspection(tiny_model(), "m")
    written = write_inspection([model], tmp_path, title="t", about={"data": "d", "split": "val"})
    assert [path.name for path in written] == ["inspect.json", "inspect.html"]
    with pytest.raises(ValueError, match=r"pip install 'softmoe-vit\[plots\]'"):
        plots.write_figures(model, tmp_path)


def test_text_table():
    """Columns under each other; a dash where a column is of another kind of router."""
    soft, sparse = inspection(tiny_model(), "a"), inspection(tiny_model("experts_choice"), "b")
    lines = layers_text(soft).splitlines()
    assert len(lines) == 3
    assert len({len(line) for line in lines}) == 1
    both = soft.layers | {f"other.{name}": r for name, r in sparse.layers.items()}
    mixed = layers_text(type(soft)("c", 3, both, {}))
    assert mixed.splitlines()[1].endswith("-")
    assert "dropped" in mixed
