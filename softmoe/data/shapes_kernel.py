"""Drawing by the compiled shapes.cpp where it can be had: the same bytes as shapes_draw.py, in a third of the time."""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np
import torch

from softmoe.accelerate.build import Kernel, call
from softmoe.data import shapes_draw as plain
from softmoe.data import shapes_tables as tables
from softmoe.data.shapes_scenes import Placed, Scenes, compose, compositions, joined

_FRAME = [(name, "f4") for name in ("ux", "u0", "uy", "vx", "v0", "vy")]
_PLACED = np.dtype(
    [*_FRAME, ("color", "f4", 3), ("pixels", "f4"), ("table", "i4"), ("rows", "i4", 2), ("columns", "i4", 2)]
)
_TEXTURE = np.dtype([*_FRAME, ("added", "f4", 3), ("rim", "f4"), ("table", "i4"), ("rimmed", "i4")])
_SCENE = np.dtype([("place", "f8", 3), ("ground", "i4"), ("noise", "i4"), ("light", "f4", 3), ("strength", "f4")])
MAX_SIZE = 512  # pixels a side
_FAR = 99.0  # beyond all pictures and all objects


def draw(scenes: Scenes, size: int) -> np.ndarray:
    """(B, size, size, 3) uint8."""
    return _draw(KERNEL.library, scenes, size) if KERNEL.available else plain.draw(scenes, size)


def self_test(library: ctypes.CDLL) -> bool:
    classes = np.array(compositions("upstream"))[::4]
    scenes = compose(classes, 0, np.arange(len(classes)))
    return all(np.array_equal(_draw(library, scenes, size), plain.draw(scenes, size)) for size in (32, 45))


def _draw(library: ctypes.CDLL, scenes: Scenes, size: int) -> np.ndarray:
    assert size <= MAX_SIZE
    layers = [*scenes.pebbles, scenes.object, scenes.companion, *scenes.twigs]
    arrays = (_scenes(scenes), _placed(joined(layers), size), _texture(scenes, size))
    numbers = (len(scenes.ground), len(layers), len(scenes.pebbles), size)
    line, threads = plain.line(size), torch.get_num_threads()
    room = np.empty((threads, 3, size, size), dtype=np.float32)
    pictures = np.empty((len(scenes.ground), size, size, 3), dtype=np.uint8)
    grounds = (tables.ground_planes(), len(tables.GROUNDS))
    rest = (tables.distance_table(), tables.texture_table(), _noise(size), room, pictures)
    call(library.draw, *arrays, *numbers, line, *grounds, *rest, threads=threads)
    return pictures


def _scenes(scenes: Scenes) -> np.ndarray:
    rows = np.empty(len(scenes.ground), dtype=_SCENE)
    rows["place"], rows["ground"], rows["light"] = scenes.ground_place, scenes.ground, scenes.light
    rows["strength"], rows["noise"] = scenes.noise.T
    return rows


def _placed(placed: Placed, size: int) -> np.ndarray:
    rows = _framed(_PLACED, plain.frame(placed))
    rows["color"], rows["table"] = placed.color, placed.shape
    rows["pixels"] = plain.pixels_of(placed, size)
    span = np.minimum(plain.reach(placed, size), _FAR)
    for name, middle in (("columns", placed.x), ("rows", -placed.y)):
        first, last = ((middle + side * span + 1) * (size / 2) for side in (-1, 1))
        rows[name] = np.stack([np.floor(first), np.ceil(last)], axis=1).clip(0, size)
    return rows


def _texture(scenes: Scenes, size: int) -> np.ndarray:
    rows = _framed(_TEXTURE, plain.frame(scenes.object, scenes.texture_scale, scenes.texture_shift))
    rows["added"] = scenes.second_color - scenes.object.color
    rows["rim"], rows["table"] = plain.rim_of(scenes.object, size), scenes.texture
    rows["rimmed"] = scenes.texture == plain.RIMMED
    return rows


def _framed(kind: np.dtype, frame: list[np.ndarray]) -> np.ndarray:
    rows = np.empty(len(frame[0]), dtype=kind)
    for (name, _), column in zip(_FRAME, frame, strict=True):
        rows[name] = column
    return rows


@cache
def _noise(size: int) -> np.ndarray:
    """The table, and a row more: it goes round."""
    return np.resize(tables.noise_table(), len(tables.noise_table()) + size)


KERNEL = Kernel("shapes", self_test, flags=("-ffp-contract=off",))
