"""What tests ask of a picture: which data and labels it shows, and whether the file on disk shows them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image


def keep_figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Keep every matplotlib figure that is written from now on, under the name of its file without the folder."""
    figure = pytest.importorskip("matplotlib.figure").Figure
    kept, write = {}, figure.savefig

    def savefig(self: Any, target: Any, *args: Any, **options: Any) -> None:
        kept[Path(target).name if isinstance(target, str | Path) else "page"] = self
        write(self, target, *args, **options)

    monkeypatch.setattr(figure, "savefig", savefig)
    return kept


def points(axis: Any) -> np.ndarray:
    """All finite (x, y) that an axis shows: of lines, scattered dots, bars and the cells of images."""
    found = [line.get_xydata() for line in axis.lines]
    found += [dots.get_offsets() for dots in axis.collections if len(dots.get_offsets())]
    found += [[(bar.get_width(), bar.get_y() + bar.get_height() / 2)] for bar in axis.patches]
    for image in axis.images:
        values = np.ma.filled(np.ma.asarray(image.get_array(), dtype=float), np.nan)
        found.append(np.argwhere(np.isfinite(values))[:, -2:])
    together = np.concatenate([np.asarray(part, dtype=float).reshape(-1, 2) for part in [*found, np.empty((0, 2))]])
    return together[np.isfinite(together).all(axis=1)]


def curves(axis: Any) -> dict[str, np.ndarray]:
    """The (n, 2) data of each line that has a name in the legend's sense."""
    return {line.get_label(): line.get_xydata() for line in axis.lines if not line.get_label().startswith("_")}


def ink(path: Path, axis: Any) -> float:
    """Share of the pixels inside an axis, in the file, that are not the background's white."""
    pixels = np.asarray(Image.open(path).convert("L"))
    height, width = pixels.shape
    box = axis.get_position()
    inside = pixels[
        round(height * (1 - box.y1)) : round(height * (1 - box.y0)), round(width * box.x0) : round(width * box.x1)
    ]
    return float((inside < 250).mean())


def nothing_hides(figure: Any) -> bool:
    """Tell if each axis with its labels and legend is inside the picture, and no legend lies on an axis."""
    figure.canvas.draw()
    whole = figure.bbox.padded(1)
    for axis in figure.axes:
        box, legend = axis.get_tightbbox(), axis.get_legend()
        if box.x0 < whole.x0 or box.x1 > whole.x1 or box.y0 < whole.y0 or box.y1 > whole.y1:
            return False
        if legend and any(legend.get_window_extent().overlaps(other.bbox) for other in figure.axes):
            return False
    return True
