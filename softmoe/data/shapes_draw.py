"""Scenes of `shapes`, drawn for many images at once with numpy.

Coordinates: the picture is [-1, 1] x [-1, 1] with y up; radii are in the same units, so a scene does not
depend on the number of pixels. From back to front: ground, pebbles, the object, its companion, twigs; then
light and noise.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np

from softmoe.data import shapes_tables as tables
from softmoe.data.hashing import GOLDEN, mix64
from softmoe.data.shapes_classes import (
    COLOR_NAMES,
    COMPANIONS,
    RELATIONS,
    SECONDS,
    SHAPES,
    TEXTURE_NAMES,
)
from softmoe.data.shapes_tables import CELLS, SPAN

_PEBBLES, _TWIGS = 3, 1
_CHUNK = 64  # images of 32 x 32 pixels drawn together: fewer cost more calls, more leave the caches
_OUTSIDE = 9.0  # a place that no picture shows
_DRAWS = 96  # uniform numbers a scene may use
_PALETTE = np.array([tables.COLORS[name] for name in COLOR_NAMES], dtype=np.float32)
_TWIG_COLORS = np.array([(92, 70, 48), (58, 50, 44), (150, 128, 100), (120, 120, 116)], dtype=np.float32)
_COMPANION_SHAPES = np.array([SHAPES.index(name) for name in COMPANIONS])
_CENTERED = np.array([centered for _, centered in tables.TEXTURES.values()])
_RIMMED = TEXTURE_NAMES.index("rimmed")


def _visible_grounds() -> np.ndarray:
    """(colors, colors, colors, 4) the grounds on which all three colors of a scene stand out most: a green
    square on grass would teach nothing."""
    ground = np.array([np.add(dark, light) / 2 for dark, light, _, _ in tables.GROUNDS.values()])
    apart = np.linalg.norm(_PALETTE[:, None] - ground[None], axis=2)
    worst = np.minimum(np.minimum(apart[:, None, None], apart[None, :, None]), apart[None, None, :])
    return np.argsort(-worst, axis=3, kind="stable")[..., :4]


_VISIBLE_GROUNDS = _visible_grounds()
_SECOND_COLORS = np.array([COLOR_NAMES.index(name) for name in SECONDS])


def uniforms(key: int, indices: np.ndarray, count: int) -> np.ndarray:
    """(len(indices), count) float64 in [0, 1): splitmix64 of (key, index, column), a pure function of the
    three."""
    state = np.uint64(key) + mix64(indices.astype(np.uint64) + GOLDEN)
    columns = np.arange(1, count + 1, dtype=np.uint64) * GOLDEN
    return (mix64(state[:, None] + columns[None, :]) >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass
class Placed:
    """One object in each of B scenes. All arrays are (B,) but `color`, (B, 3)."""

    shape: np.ndarray
    x: np.ndarray
    y: np.ndarray
    radius: np.ndarray
    angle: np.ndarray
    color: np.ndarray
    squeeze: np.ndarray | float = 1.0  # height over width, for twigs


@dataclass
class Scenes:
    """Everything that B pictures show. `ground` is what captions speak of beside the class."""

    object: Placed
    companion: Placed
    pebbles: list[Placed]
    twigs: list[Placed]
    texture: np.ndarray
    second_color: np.ndarray  # (B, 3)
    texture_scale: np.ndarray
    texture_shift: np.ndarray  # (B, 2) in radii
    ground: np.ndarray
    ground_place: np.ndarray  # (B, 3): shift down, shift across, zoom
    light: np.ndarray  # (B, 3): gain, slope across, slope up
    noise: np.ndarray  # (B, 2): strength, where in the table


class _Dice:
    """Hands out columns of one table of uniform numbers, so that adding a draw at the end changes nothing
    before it."""

    def __init__(self, table: np.ndarray):
        self.table, self.used = table, 0

    def span(self, low: float | np.ndarray, high: float | np.ndarray) -> np.ndarray:
        column = self.table[:, self.used]
        self.used += 1
        return low + (high - low) * column

    def pick(self, count: int) -> np.ndarray:
        return self.span(0, count).astype(np.int64)


def compose(classes: np.ndarray, key: int, indices: np.ndarray, clutter: float = 1.0) -> Scenes:
    """Scenes for compositions (B, 7), drawn from (key, index) alone.

    `clutter` in [0, 1] scales all that makes a scene harder: pebbles, twigs, uneven light and noise."""
    dice = _Dice(uniforms(key, indices, _DRAWS))
    color, second, texture, shape, relation, companion_color, companion = classes.T
    big, small = dice.span(0.48, 0.66), dice.span(0.20, 0.28)
    along, across = dice.span(0.85, 1.0) * (big + small), dice.span(-0.35, 0.35)
    side = np.where(dice.span(0, 1) < 0.5, -1.0, 1.0)
    is_ = {name: relation == i for i, name in enumerate(RELATIONS)}
    # where the companion is, seen from the object: "above" means that the object is above its companion
    dx = np.select([is_["beside"], is_["behind"]], [side * along, across * 0.4], across)
    dy = np.select([is_["above"], is_["below"], is_["beside"]], [-along, along, across], dice.span(-0.12, 0.12))
    x = _fit(dice, big, small, dx)
    y = _fit(dice, big, small, dy)
    ground = _VISIBLE_GROUNDS[color, _SECOND_COLORS[second], companion_color, dice.pick(4)]
    turn = np.pi / 9
    main = Placed(shape, x, y, big, dice.span(-turn, turn), _jittered(dice, color))
    small_one = Placed(
        _COMPANION_SHAPES[companion],
        x + dx,
        y + dy,
        small,
        dice.span(-turn, turn),
        _jittered(dice, companion_color),
    )
    shift = np.stack([dice.span(0, 0.5), dice.span(0, 0.5)], axis=1) * ~_CENTERED[texture][:, None]
    ground_place = np.stack([dice.span(0, CELLS), dice.span(0, CELLS), dice.span(0.7, 1.3)], axis=1)
    light = np.stack([dice.span(-0.25, 0.15), dice.span(-0.3, 0.3), dice.span(-0.3, 0.3)], axis=1) * clutter
    light[:, 0] += 1
    noise = np.stack([dice.span(2, 9) * clutter, dice.span(0, 2**16)], axis=1)
    return Scenes(
        main,
        small_one,
        [_pebble(dice, clutter) for _ in range(_PEBBLES)],
        [_twig(dice, main, clutter) for _ in range(_TWIGS)],
        texture,
        _jittered(dice, _SECOND_COLORS[second]),
        dice.span(0.85, 1.15),
        shift,
        ground,
        ground_place,
        light,
        noise,
    )


def _fit(dice: _Dice, big: np.ndarray, small: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """A place for the object such that it and its companion, at `offset` from it, lie within the picture."""
    low = np.maximum(-1 + big, -1 + small - offset) - 0.05
    high = np.minimum(1 - big, 1 - small - offset) + 0.05
    middle, half = (low + high) / 2, np.maximum(high - low, 0) / 2
    return middle + half * dice.span(-1, 1)


def _jittered(dice: _Dice, color: np.ndarray) -> np.ndarray:
    wobble = np.stack([dice.span(-14, 14) for _ in range(3)], axis=1)
    return np.clip(_PALETTE[color] + wobble, 0, 255)


def _pebble(dice: _Dice, clutter: float) -> Placed:
    shape, color = dice.pick(len(SHAPES)), _jittered(dice, dice.pick(len(_PALETTE)))
    x, y = np.where(dice.span(0, 1) < clutter, dice.span(-1, 1), _OUTSIDE), dice.span(-1, 1)
    return Placed(shape, x, y, dice.span(0.07, 0.14), dice.span(0, 2 * np.pi), color)


def _twig(dice: _Dice, main: Placed, clutter: float) -> Placed:
    """A thin stick that touches the object's edge; half of them lie outside the picture, that is, are absent."""
    where, present = dice.span(0, 2 * np.pi), dice.span(0, 1) < 0.5 * clutter
    reach = dice.span(0.5, 1.1) * main.radius
    x = np.where(present, main.x + reach * np.cos(where), _OUTSIDE)
    y = main.y + reach * np.sin(where)
    color = _TWIG_COLORS[dice.pick(len(_TWIG_COLORS))]
    shape = np.full(len(x), SHAPES.index("plank"))
    return Placed(shape, x, y, dice.span(0.4, 0.7), dice.span(0, np.pi), color, dice.span(0.14, 0.22))


def draw(scenes: Scenes, size: int) -> np.ndarray:
    """(B, size, size, 3) uint8."""
    count = len(scenes.ground)
    pictures = np.empty((count, size, size, 3), dtype=np.uint8)
    chunk = max(1, _CHUNK * 32 * 32 // (size * size))
    for start in range(0, count, chunk):
        rows = np.arange(start, min(start + chunk, count))
        _Canvas(chosen(scenes, rows), size).paint(pictures[start : start + chunk])
    return pictures


class _Canvas:
    """Planes of (3, b, size, size) float32 being painted."""

    def __init__(self, scenes: Scenes, size: int):
        self.scenes, self.size = scenes, size
        self.line = ((np.arange(size) + 0.5) / size * 2 - 1).astype(np.float32)
        self.x, self.y = self.line[None, None, :], -self.line[None, :, None]
        self.planes = self._ground()

    def paint(self, pictures: np.ndarray) -> None:
        scenes = self.scenes
        for pebble in scenes.pebbles:
            self._solid(pebble)
        self._textured(scenes.object)
        self._solid(scenes.companion)
        for twig in scenes.twigs:
            self._solid(twig)
        self._light_and_noise()
        for k, plane in enumerate(self.planes):
            pictures[..., k] = plane  # cuts off to whole numbers

    def _ground(self) -> np.ndarray:
        place = self.scenes.ground_place
        step = np.arange(self.size) * (128 / self.size)  # a picture shows half a tile at zoom 1
        row = (place[:, 0:1] + step * place[:, 2:3]).astype(np.int32) & (CELLS - 1)
        column = (place[:, 1:2] + step * place[:, 2:3]).astype(np.int32) & (CELLS - 1)
        first = self.scenes.ground.astype(np.int32)[:, None] * (CELLS * CELLS) + row * CELLS
        where = first[:, :, None] + column[:, None, :]
        return np.stack([plane.take(where) for plane in tables.ground_planes()])

    def _solid(self, placed: Placed) -> None:
        """Only in the part of each picture that the object may touch: pebbles are small and many twigs absent."""
        span = _reach(placed, self.size)
        near = np.flatnonzero(np.maximum(np.abs(placed.x), np.abs(placed.y)) - span < 1)
        if not near.size:
            return
        placed, span = chosen(placed, near), span[near]
        side = int(min(self.size, np.ceil(span.max() * self.size) + 2))  # pixels
        middle = np.stack([placed.x, -placed.y])
        first = ((middle + 1) * (self.size / 2) - side / 2).astype(np.int64).clip(0, self.size - side)
        columns, rows = first[:, :, None] + np.arange(side)
        where = (near[:, None] * self.size + rows)[:, :, None] * self.size + columns[:, None, :]
        cover = _coverage(self._distance(placed, self.line[columns][:, None, :], -self.line[rows][:, :, None]))
        for plane, color in zip(self.planes.reshape(3, -1), placed.color.T, strict=True):
            part = plane.take(where)
            part += cover * (_column(color) - part)
            plane[where] = part

    def _distance(self, placed: Placed, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Signed distance to the outline in pixels, at columns x and rows y."""
        u, v = _local(placed, x, y)
        where = _column(placed.shape * CELLS * CELLS).astype(np.int32)
        where = where + _cells(v, wrap=False) * CELLS + _cells(u, wrap=False)
        pixels = placed.radius * placed.squeeze * (self.size / 2)
        return tables.distance_table().take(where) * _column(pixels)

    def _textured(self, placed: Placed) -> None:
        scenes = self.scenes
        distance = self._distance(placed, self.x, self.y)
        u, v = _local(placed, self.x, self.y, scenes.texture_scale, scenes.texture_shift)
        where = _column(scenes.texture * CELLS * CELLS).astype(np.int32)
        share = tables.texture_table().take(where + _cells(v, wrap=True) * CELLS + _cells(u, wrap=True))
        rimmed = np.flatnonzero(scenes.texture == _RIMMED)
        rim = _column(placed.radius * (self.size / 2 * 0.16))[rimmed]  # a sixth of the radius
        share[rimmed] = _coverage(-rim - distance[rimmed])
        cover = _coverage(distance)
        for plane, first, second in zip(self.planes, placed.color.T, scenes.second_color.T, strict=True):
            color = _column(first) + share * _column(second - first)
            plane += cover * (color - plane)

    def _light_and_noise(self) -> None:
        gain, across, up = (_column(column) for column in self.scenes.light.T)
        light = gain * (1 + across * self.x + up * self.y)
        strength, start = self.scenes.noise.T
        windows = tables.noise_windows(self.size * self.size)
        for k, plane in enumerate(self.planes):
            grain = windows[(start.astype(np.int64) + k * 7919) % len(windows)].reshape(plane.shape)
            np.multiply(plane, light, out=plane)
            np.add(plane, grain * _column(strength), out=plane)
            np.clip(plane, 0, 255, out=plane)


def chosen(of: Any, rows: np.ndarray) -> Any:
    """Scenes or objects of some of the pictures."""
    if isinstance(of, np.ndarray):
        return of[rows]
    if isinstance(of, list):
        return [chosen(one, rows) for one in of]
    if is_dataclass(of):
        return replace(of, **{f.name: chosen(getattr(of, f.name), rows) for f in fields(of)})  # pyright: ignore[reportArgumentType]
    return of


def _column(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32)[:, None, None]


def _local(
    placed: Placed, x: np.ndarray, y: np.ndarray, scale: np.ndarray | float = 1.0, shift: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Table coordinates (u, v) of each pixel in the object's own frame, as (b, rows, columns) float32."""
    cells = CELLS / SPAN
    cos, sin = np.cos(placed.angle), np.sin(placed.angle)
    per_u = cells / placed.radius * scale
    per_v = cells / (placed.radius * placed.squeeze) * scale
    moved = np.zeros((len(cos), 2)) if shift is None else shift * cells
    u0 = CELLS / 2 + moved[:, 0] - per_u * (cos * placed.x + sin * placed.y)
    v0 = CELLS / 2 + moved[:, 1] - per_v * (sin * placed.x - cos * placed.y)
    u = (_column(per_u * cos) * x + _column(u0)) + _column(per_u * sin) * y
    v = (_column(per_v * sin) * x + _column(v0)) - _column(per_v * cos) * y
    return u, v


def _reach(placed: Placed, size: int) -> np.ndarray:
    """(b,) how far from its center an object may color a pixel; endless where it is hardly larger than one."""
    thinnest = float(np.min(placed.radius * placed.squeeze)) * (size / 2)
    radii = tables.radii_within(np.ceil(8 * 0.5 / thinnest) / 8)
    return placed.radius * np.maximum(placed.squeeze, 1.0) * radii + 2 / size


def _cells(coordinate: np.ndarray, wrap: bool) -> np.ndarray:
    """Whole cells within the table: wrapped around, or held at its border."""
    if wrap:
        return coordinate.astype(np.int32) & (CELLS - 1)
    np.maximum(coordinate, 0, out=coordinate)
    np.minimum(coordinate, CELLS - 1, out=coordinate)
    return coordinate.astype(np.int32)


def _coverage(distance: np.ndarray) -> np.ndarray:
    """The share of a pixel that lies inside an outline at this distance: one pixel of soft edge."""
    cover = 0.5 - distance
    np.maximum(cover, 0, out=cover)
    np.minimum(cover, 1, out=cover)
    return cover
