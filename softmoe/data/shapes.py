"""The source `shapes`: generated pictures, as many as wanted, without a download, and hard enough to train on.

Example `index` of a split is a pure function of (seed, split, index); the scene does not depend on the size.
shapes_scenes.py has the classes and composes scenes, shapes_draw.py draws them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property

import numpy as np

from softmoe.data.order import uniforms
from softmoe.data.shapes_draw import draw
from softmoe.data.shapes_scenes import (
    CLASS_SETS,
    COMPANIONS,
    GROUND_NAMES,
    PAINTS,
    RELATIONS,
    SECONDS,
    SHAPES,
    TEXTURE_NAMES,
    Scenes,
    Words,
    compose,
    compositions,
    sentences,
)
from softmoe.data.source import DrawnSource, Example, drawing_options, fingerprint

_LENGTHS = {"train": 2**20}
_EVALUATION_LENGTH = 5760  # 20 of each of the 288 upstream classes
_VERSION = "1"  # changes when the same (seed, index) would give another picture


class ShapesSource(DrawnSource):
    """A source of generated scenes of textured shapes."""

    kind = "shapes"

    def __init__(self, split: str, size: int, which: str, seed: int, length: int, clutter: float):
        self.split, self.size, self.which, self.seed, self.length = split, size, which, seed, length
        self.clutter = clutter
        self.classes = tuple(c.name for c in compositions(which))
        self.fingerprint = fingerprint("shapes", _VERSION, split, which, [size, seed, length, round(clutter * 1000)])
        self._key = int(fingerprint("stream", split, [seed])[:16], 16)  # streams of splits and seeds never meet

    @cached_property
    def _table(self) -> np.ndarray:
        return np.array(compositions(self.which))

    def read_batch(self, indices: Sequence[int] | np.ndarray, captions: bool = True) -> list[Example]:
        rows = self.rows(indices)
        labels = rows % len(self.classes)
        scenes = compose(self._table[labels], self._key, rows, self.clutter)
        pictures = draw(scenes, self.size)
        said = self._captions(scenes, labels, rows) if captions else [()] * len(rows)
        return [
            Example(picture, (label,), sentences, f"shapes/{self.split}/{index}")
            for picture, label, sentences, index in zip(pictures, labels.tolist(), said, rows.tolist(), strict=True)
        ]

    def read_captions(self, indices: Sequence[int] | np.ndarray) -> list[tuple[str, ...]]:
        """Make captions without drawing the scenes."""
        rows = self.rows(indices)
        labels = rows % len(self.classes)
        return self._captions(compose(self._table[labels], self._key, rows, self.clutter), labels, rows)

    def _captions(self, scenes: Scenes, labels: np.ndarray, rows: np.ndarray) -> list[tuple[str, ...]]:
        wording = (uniforms(self._key ^ 0x5EED, rows, 1)[:, 0] * 2**20).astype(int)
        scene_facts = zip(labels.tolist(), scenes.ground.tolist(), wording.tolist(), strict=True)
        return [sentences(_words(self.which, label, ground), draw) for label, ground, draw in scene_facts]


@cache
def _words(which: str, label: int, ground: int) -> Words:
    it = compositions(which)[label]
    return Words(
        SHAPES[it.shape],
        TEXTURE_NAMES[it.texture],
        PAINTS[it.color],
        SECONDS[it.second],
        RELATIONS[it.relation],
        COMPANIONS[it.companion],
        PAINTS[it.companion_color],
        GROUND_NAMES[ground],
    )


def open_shapes(
    split: str, *, size: str = "32", classes: str = "upstream", seed: str = "0", length: str = "", clutter: str = "1"
) -> ShapesSource:
    if classes not in CLASS_SETS:
        raise ValueError(f"shapes has the class sets {', '.join(CLASS_SETS)}, not {classes!r}.")
    pixels, key, count = drawing_options("shapes", size, seed, length, _LENGTHS.get(split, _EVALUATION_LENGTH))
    return ShapesSource(split, pixels, classes, key, count, _share("clutter", clutter))


def _share(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise ValueError(f"The option {name} must be a number from 0 to 1, not {value!r}.")
    return number
