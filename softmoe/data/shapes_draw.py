"""Scenes of `shapes`, drawn for many images at once with numpy.

From back to front: ground, pebbles, the object, its companion, twigs; then light and noise.
"""

from __future__ import annotations

import numpy as np

from softmoe.data import shapes_tables as tables
from softmoe.data.shapes_scenes import TEXTURE_NAMES, Placed, Scenes, chosen, joined
from softmoe.data.shapes_tables import CELLS, SPAN

_CHUNK = 64  # images of 32 x 32 pixels drawn together: fewer cost more calls, more leave the caches
RIMMED = TEXTURE_NAMES.index("rimmed")


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
        self.line = line(size)
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
        placed, count = joined(layers), len(self.scenes.ground)
        span = reach(placed, self.size)
        near = np.flatnonzero(np.maximum(np.abs(placed.x), np.abs(placed.y)) - span < 1)
        if not near.size:
            return
        placed, span = chosen(placed, near), span[near]
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
        """Signed distance to the outline in pixels, at columns x and rows y."""
        u, v = _within(frame(placed), x, y)
        where = _column(placed.shape * CELLS * CELLS).astype(np.int32)
        where = where + _held(v) * CELLS + _held(u)
        return tables.distance_table().take(where) * _column(pixels_of(placed, self.size))

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
        u, v = _within(frame(placed, self.scenes.texture_scale[near], self.scenes.texture_shift[near]), x, y)
        u, v = (coordinate.take(inside).astype(np.int64) & (CELLS - 1) for coordinate in (u, v))
        share = tables.texture_table().take(texture.take(whose) * (CELLS * CELLS) + v * CELLS + u)
        rimmed = np.flatnonzero(texture.take(whose) == RIMMED)
        rim = rim_of(placed, self.size)
        share[rimmed] = _coverage(-rim[whose[rimmed]] - distance.take(inside[rimmed]))
        return share

    def _light_and_noise(self) -> None:
        gain, across, up = (_column(column) for column in self.scenes.light.T)
        light = gain * (1 + across * self.line[None, None, :] - up * self.line[None, :, None])
        strength, start = self.scenes.noise.T
        windows = tables.noise_windows(self.size * self.size)
        for k, plane in enumerate(self.planes):
            grain = windows[(start.astype(np.int64) + k * 7919) % len(windows)].reshape(plane.shape)
            np.multiply(plane, light, out=plane)
            grain *= _column(strength)
            np.add(plane, grain, out=plane)
            np.clip(plane, 0, 255, out=plane)


def line(size: int) -> np.ndarray:
    """The places of the pixels of a row."""
    return ((np.arange(size) + 0.5) / size * 2 - 1).astype(np.float32)


def pixels_of(placed: Placed, size: int) -> np.ndarray:
    """Return the pixels of a unit of the distance table, where the object is thinnest."""
    return placed.radius * placed.squeeze * (size / 2)


def rim_of(placed: Placed, size: int) -> np.ndarray:
    """Pixels: a sixth of the radius."""
    return (placed.radius * (size / 2 * 0.16)).astype(np.float32)


def _column(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32)[:, None, None]


def frame(placed: Placed, scale: np.ndarray | float = 1.0, shift: np.ndarray | None = None) -> list[np.ndarray]:
    """ux, u0, uy, vx, v0, vy of each object, float32: where a pixel at (x, y) lies in its table, of CELLS x CELLS,
    u = ux x + u0 + uy y and v = vx x + v0 + vy y."""
    cells = CELLS / SPAN
    cos, sin = np.cos(placed.angle), np.sin(placed.angle)
    per_u = cells / placed.radius * scale
    per_v = cells / (placed.radius * placed.squeeze) * scale
    moved = np.zeros((len(cos), 2)) if shift is None else shift * cells
    u0 = CELLS / 2 + moved[:, 0] - per_u * (cos * placed.x + sin * placed.y)
    v0 = CELLS / 2 + moved[:, 1] - per_v * (sin * placed.x - cos * placed.y)
    columns = (per_u * cos, u0, per_u * sin, per_v * sin, v0, -per_v * cos)
    return [column.astype(np.float32) for column in columns]


def _within(frame: list[np.ndarray], x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Table coordinates (u, v) of each pixel, as (b, rows, columns) float32."""
    ux, u0, uy, vx, v0, vy = (column[:, None, None] for column in frame)
    return (ux * x + u0) + uy * y, (vx * x + v0) + vy * y


def reach(placed: Placed, size: int) -> np.ndarray:
    """(b,) how far from its center an object may color a pixel; endless where it is hardly larger than one."""
    eighths, which = np.unique(np.ceil(8 * 0.5 / pixels_of(placed, size)), return_inverse=True)  # half a pixel in radii
    radii = np.array([tables.radii_within(count / 8) for count in eighths.tolist()])[which]
    return placed.radius * np.maximum(placed.squeeze, 1.0) * radii + 2 / size


def _held(coordinate: np.ndarray) -> np.ndarray:
    """Whole cells, held at the table's border."""
    np.maximum(coordinate, 0, out=coordinate)
    np.minimum(coordinate, CELLS - 1, out=coordinate)
    return coordinate.astype(np.int32)


def _coverage(distance: np.ndarray) -> np.ndarray:
    """The share of a pixel that lies inside an outline at this distance: one pixel of soft edge."""
    cover = 0.5 - distance
    np.maximum(cover, 0, out=cover)
    np.minimum(cover, 1, out=cover)
    return cover
