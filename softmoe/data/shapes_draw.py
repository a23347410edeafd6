"""Draw the scenes of `shapes`, many images at once.

From back to front: ground, pebbles, the object, its companion, twigs; then light and noise. The numpy code here is the
definition; the compiled shapes.cpp gives the same bytes in a third of the time where it can be built.
"""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np
import torch

from softmoe.accelerate.build import Kernel, call
from softmoe.data import shapes_tables as tables
from softmoe.data.shapes_scenes import TEXTURE_NAMES, Placed, Scenes, compose, compositions, concatenated, select_rows
from softmoe.data.shapes_tables import CELLS, SPAN
from softmoe.data.source import MAX_DRAWN

_CHUNK = 64  # images of 32 x 32 pixels drawn together: fewer cost more calls, more leave the caches
RIMMED = TEXTURE_NAMES.index("rimmed")


def draw_plain(scenes: Scenes, size: int) -> np.ndarray:
    """Draw with numpy: (B, size, size, 3) uint8."""
    count = len(scenes.ground)
    pictures = np.empty((count, size, size, 3), dtype=np.uint8)
    chunk = max(1, _CHUNK * 32 * 32 // (size * size))
    for start in range(0, count, chunk):
        rows = np.arange(start, min(start + chunk, count))
        _Canvas(select_rows(scenes, rows), size).paint(pictures[start : start + chunk])
    return pictures


class _Canvas:
    """The color planes (3, b, size, size) float32 of b pictures while they are painted."""

    def __init__(self, scenes: Scenes, size: int):
        self.scenes, self.size = scenes, size
        self.line = pixel_centers(size)
        self.planes = self._ground()

    def paint(self, pictures: np.ndarray) -> None:
        scenes = self.scenes
        for layers in (scenes.pebbles, [scenes.object], [scenes.companion], scenes.twigs):
            if layers:
                self._objects(layers, textured=layers[0] is scenes.object)
        self._light_and_noise()
        for k, plane in enumerate(self.planes):
            pictures[..., k] = plane  # cuts off to whole numbers

    def _ground(self) -> np.ndarray:
        place = self.scenes.ground_place
        step = np.arange(self.size) * (128 / self.size)  # a picture shows half a tile at zoom 1
        row = (place[:, 0:1] + step * place[:, 2:3]).astype(np.int64) & (CELLS - 1)
        column = (place[:, 1:2] + step * place[:, 2:3]).astype(np.int64) & (CELLS - 1)
        first = self.scenes.ground[:, None] * (CELLS * CELLS) + row * CELLS
        where = first[:, :, None] + column[:, None, :]
        return np.stack([plane.take(where) for plane in tables.ground_planes()])

    def _objects(self, layers: list[Placed], textured: bool) -> None:
        """Paint one object of each picture, layer over layer, by one computation for all of them.

        Distances are looked up in the part of each picture that its object may touch (pebbles are small and many twigs
        absent), everything else only where the object is.
        """
        placed, count = concatenated(layers), len(self.scenes.ground)
        span = reach(placed, self.size)
        near = np.flatnonzero(np.maximum(np.abs(placed.x), np.abs(placed.y)) - span < 1)
        if not near.size:
            return
        placed, span = select_rows(placed, near), span[near]
        side = int(min(self.size, np.ceil(span.max() * self.size) + 2))  # pixels
        middle = np.stack([placed.x, -placed.y])
        first = ((middle + 1) * (self.size / 2) - side / 2).astype(np.int64).clip(0, self.size - side)
        columns, rows = first[:, :, None] + np.arange(side)
        x, y = self.line[columns][:, None, :], -self.line[rows][:, :, None]
        distance = self._distance(placed, x, y)
        cover = _coverage(distance)
        inside = np.flatnonzero(cover > 0)
        whose = inside // (side * side)
        where = (((near % count)[:, None] * self.size + rows)[:, :, None] * self.size + columns[:, None, :]).take(
            inside
        )
        color = placed.color.T.astype(np.float32).take(whose, axis=1)
        if textured:
            share = self._shares(placed, near, x, y, distance, inside, whose)
            color += share * (self.scenes.second_color[near] - placed.color).T.astype(np.float32).take(whose, axis=1)
        cover = cover.take(inside)
        ends = np.searchsorted(near[whose], count * np.arange(1, len(layers) + 1))
        for start, end in zip((0, *ends), ends, strict=False):  # layers may lie over each other
            part = slice(start, end)
            for plane, shade in zip(self.planes.reshape(3, -1), color, strict=True):
                there = plane.take(where[part])
                there += cover[part] * (shade[part] - there)
                plane[where[part]] = there

    def _distance(self, placed: Placed, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return the signed distance to the outline in pixels, at columns x and rows y."""
        u, v = _table_coordinates(frame(placed), x, y)
        where = as_column(placed.shape * CELLS * CELLS).astype(np.int32)
        where = where + _clamped_cells(v) * CELLS + _clamped_cells(u)
        return tables.distance_table().take(where) * as_column(pixels_per_radius(placed, self.size))

    def _shares(
        self,
        placed: Placed,
        near: np.ndarray,
        x: np.ndarray,
        y: np.ndarray,
        distance: np.ndarray,
        inside: np.ndarray,
        whose: np.ndarray,
    ) -> np.ndarray:
        """Return how much of the second color each pixel inside the object has."""
        texture = self.scenes.texture[near]
        scale, shift = self.scenes.texture_scale[near], self.scenes.texture_shift[near]
        u, v = _table_coordinates(frame(placed, scale, shift), x, y)
        u, v = (coordinate.take(inside).astype(np.int64) & (CELLS - 1) for coordinate in (u, v))
        share = tables.texture_table().take(texture.take(whose) * (CELLS * CELLS) + v * CELLS + u)
        rimmed = np.flatnonzero(texture.take(whose) == RIMMED)
        rim = rim_width(placed, self.size)
        share[rimmed] = _coverage(-rim[whose[rimmed]] - distance.take(inside[rimmed]))
        return share

    def _light_and_noise(self) -> None:
        gain, across, up = (as_column(column) for column in self.scenes.light.T)
        light = gain * (1 + across * self.line[None, None, :] - up * self.line[None, :, None])
        strength, start = self.scenes.noise.T
        windows = tables.noise_windows(self.size * self.size)
        for k, plane in enumerate(self.planes):
            grain = windows[(start.astype(np.int64) + k * 7919) % len(windows)].reshape(plane.shape)
            np.multiply(plane, light, out=plane)
            grain *= as_column(strength)
            np.add(plane, grain, out=plane)
            np.clip(plane, 0, 255, out=plane)


def pixel_centers(size: int) -> np.ndarray:
    """Return the coordinates, in [-1, 1], of the centers of a row's pixels."""
    return ((np.arange(size) + 0.5) / size * 2 - 1).astype(np.float32)


def pixels_per_radius(placed: Placed, size: int) -> np.ndarray:
    """Return how many pixels a unit of the distance table is, along the object's thinner axis."""
    return placed.radius * placed.squeeze * (size / 2)


def rim_width(placed: Placed, size: int) -> np.ndarray:
    """Return the width of a rim in pixels: about a sixth of the radius."""
    return (placed.radius * (size / 2 * 0.16)).astype(np.float32)


def as_column(values: np.ndarray) -> np.ndarray:
    """Return (b,) values as (b, 1, 1) float32, to be broadcast over pictures."""
    return values.astype(np.float32)[:, None, None]


def frame(placed: Placed, scale: np.ndarray | float = 1.0, shift: np.ndarray | None = None) -> list[np.ndarray]:
    """Return float32 ux, u0, uy, vx, v0, vy of each object, which lead from the picture to the object's table.

    A pixel at (x, y) lies in the table of CELLS x CELLS at u = ux x + u0 + uy y and v = vx x + v0 + vy y.
    """
    cells = CELLS / SPAN
    cos, sin = np.cos(placed.angle), np.sin(placed.angle)
    per_u = cells / placed.radius * scale
    per_v = cells / (placed.radius * placed.squeeze) * scale
    moved = np.zeros((len(cos), 2)) if shift is None else shift * cells
    u0 = CELLS / 2 + moved[:, 0] - per_u * (cos * placed.x + sin * placed.y)
    v0 = CELLS / 2 + moved[:, 1] - per_v * (sin * placed.x - cos * placed.y)
    columns = (per_u * cos, u0, per_u * sin, per_v * sin, v0, -per_v * cos)
    return [column.astype(np.float32) for column in columns]


def _table_coordinates(frame: list[np.ndarray], x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the table coordinates (u, v) of each pixel, as (b, rows, columns) float32."""
    ux, u0, uy, vx, v0, vy = (column[:, None, None] for column in frame)
    return (ux * x + u0) + uy * y, (vx * x + v0) + vy * y


def reach(placed: Placed, size: int) -> np.ndarray:
    """Return (b,) how far from its center an object may color a pixel; infinite where it is hardly larger than one."""
    eighths, which = np.unique(
        np.ceil(8 * 0.5 / pixels_per_radius(placed, size)), return_inverse=True
    )  # half a pixel in radii
    radii = np.array([tables.radii_within(count / 8) for count in eighths.tolist()])[which]
    return placed.radius * np.maximum(placed.squeeze, 1.0) * radii + 2 / size


def _clamped_cells(coordinate: np.ndarray) -> np.ndarray:
    """Round down to whole cells, clamped to the table; `coordinate` is overwritten."""
    np.maximum(coordinate, 0, out=coordinate)
    np.minimum(coordinate, CELLS - 1, out=coordinate)
    return coordinate.astype(np.int32)


def _coverage(distance: np.ndarray) -> np.ndarray:
    """Return the share of a pixel inside an outline at this distance: the edge is one pixel soft."""
    cover = 0.5 - distance
    np.maximum(cover, 0, out=cover)
    np.minimum(cover, 1, out=cover)
    return cover


_FRAME = [(name, "f4") for name in ("ux", "u0", "uy", "vx", "v0", "vy")]
_PLACED = np.dtype(
    [*_FRAME, ("color", "f4", 3), ("pixels", "f4"), ("table", "i4"), ("rows", "i4", 2), ("columns", "i4", 2)]
)
_TEXTURE = np.dtype([*_FRAME, ("added", "f4", 3), ("rim", "f4"), ("table", "i4"), ("rimmed", "i4")])
_SCENE = np.dtype([("place", "f8", 3), ("ground", "i4"), ("noise", "i4"), ("light", "f4", 3), ("strength", "f4")])
_FAR = 99.0  # beyond all pictures and all objects


def draw(scenes: Scenes, size: int) -> np.ndarray:
    """Draw with the compiled code if it can be built: (B, size, size, 3) uint8."""
    return draw_compiled(KERNEL.library, scenes, size) if KERNEL.available else draw_plain(scenes, size)


def self_test(library: ctypes.CDLL) -> bool:
    """Tell if the compiled code gives the bytes of the plain one."""
    classes = np.array(compositions("upstream"))[::4]
    scenes = compose(classes, 0, np.arange(len(classes)))
    return all(np.array_equal(draw_compiled(library, scenes, size), draw_plain(scenes, size)) for size in (32, 45))


def draw_compiled(library: ctypes.CDLL, scenes: Scenes, size: int) -> np.ndarray:
    assert size <= MAX_DRAWN
    layers = [*scenes.pebbles, scenes.object, scenes.companion, *scenes.twigs]
    arrays = (_scenes(scenes), _placed(concatenated(layers), size), _texture(scenes, size))
    numbers = (len(scenes.ground), len(layers), len(scenes.pebbles), size)
    line, threads = pixel_centers(size), torch.get_num_threads()
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
    rows = _framed(_PLACED, frame(placed))
    rows["color"], rows["table"] = placed.color, placed.shape
    rows["pixels"] = pixels_per_radius(placed, size)
    span = np.minimum(reach(placed, size), _FAR)
    for name, middle in (("columns", placed.x), ("rows", -placed.y)):
        first, last = ((middle + side * span + 1) * (size / 2) for side in (-1, 1))
        rows[name] = np.stack([np.floor(first), np.ceil(last)], axis=1).clip(0, size)
    return rows


def _texture(scenes: Scenes, size: int) -> np.ndarray:
    rows = _framed(_TEXTURE, frame(scenes.object, scenes.texture_scale, scenes.texture_shift))
    rows["added"] = scenes.second_color - scenes.object.color
    rows["rim"], rows["table"] = rim_width(scenes.object, size), scenes.texture
    rows["rimmed"] = scenes.texture == RIMMED
    return rows


def _framed(kind: np.dtype, frame: list[np.ndarray]) -> np.ndarray:
    rows = np.empty(len(frame[0]), dtype=kind)
    for (name, _), column in zip(_FRAME, frame, strict=True):
        rows[name] = column
    return rows


@cache
def _noise(size: int) -> np.ndarray:
    """Return the noise table with a row more, the first again: a row of pixels may begin anywhere."""
    return np.resize(tables.noise_table(), len(tables.noise_table()) + size)


KERNEL = Kernel("shapes", self_test, flags=("-ffp-contract=off",))
