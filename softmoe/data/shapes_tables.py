"""Compute the look-up tables from which `shapes` are drawn: signed distances, textures, grounds, colors.

Every outline and pattern is evaluated once on a fine grid over [-2, 2) in the object's own coordinates. Drawing is then
one gather per object whatever its shape, and sub-pixel placement, rotation and scale stay exact to 1/64 of the radius.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

CELLS = 256  # per side of a table; a power of two, so that wrapping a texture is a bit mask
SPAN = 4.0  # the width of [-2, 2)
_PERIOD = 0.5  # of the repeating textures, in radii; divides SPAN

COLORS = {
    "red": (214, 40, 40),
    "orange": (245, 135, 31),
    "yellow": (250, 215, 60),
    "green": (56, 158, 60),
    "cyan": (70, 200, 215),
    "blue": (45, 85, 210),
    "purple": (130, 60, 175),
    "pink": (245, 130, 180),
    "white": (245, 245, 245),
    "black": (24, 24, 28),
}

Field = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (x, y) -> value, y pointing up


def _polygon(points: list[tuple[float, float]]) -> Field:
    """Return the exact signed distance to a simple polygon, negative inside."""

    def distance(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        best = np.full(x.shape, np.inf)
        inside = np.zeros(x.shape, dtype=bool)
        for (ax, ay), (bx, by) in zip(points, points[1:] + points[:1], strict=True):
            ex, ey = bx - ax, by - ay
            t = np.clip(((x - ax) * ex + (y - ay) * ey) / (ex * ex + ey * ey), 0, 1)
            best = np.minimum(best, np.hypot(x - ax - t * ex, y - ay - t * ey))
            crosses = (ay > y) != (by > y)
            if ey:
                inside ^= crosses & (x < ax + (y - ay) / ey * ex)
        return np.where(inside, -best, best)

    return distance


def _regular(sides: int, inner: float | None = None) -> Field:
    """Return the distance to a regular polygon pointing up, or to a star with its notches at radius `inner`."""
    radii = [1.0] * sides if inner is None else [1.0, inner] * sides
    angles = [np.pi / 2 + 2 * np.pi * k / len(radii) for k in range(len(radii))]
    return _polygon([(r * np.cos(a), r * np.sin(a)) for r, a in zip(radii, angles, strict=True)])


def _disk(radius: float, cx: float = 0.0, cy: float = 0.0) -> Field:
    return lambda x, y: np.hypot(x - cx, y - cy) - radius


def _petals(count: int, depth: float, sharp: float) -> Field:
    """Return the distance to a disk whose radius waves `count` times; `sharp` > 0 squares the wave into teeth."""

    def distance(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        wave = np.cos(count * np.arctan2(x, y))
        if sharp:
            wave = np.tanh(sharp * wave) / np.tanh(sharp)
        return 0.9 * (np.hypot(x, y) - (1 - depth + depth * wave))

    return distance


def _union(*parts: Field) -> Field:
    return lambda x, y: np.minimum.reduce([p(x, y) for p in parts])


def _minus(a: Field, b: Field) -> Field:
    return lambda x, y: np.maximum(a(x, y), -b(x, y))


def _box(cx: float, cy: float, half_width: float, half_height: float) -> Field:
    left, right, low, high = cx - half_width, cx + half_width, cy - half_height, cy + half_height
    return _polygon([(left, low), (right, low), (right, high), (left, high)])


_HEART = _union(
    _disk(0.48, -0.42, 0.30), _disk(0.48, 0.42, 0.30), _polygon([(-0.84, 0.08), (0.0, -0.95), (0.84, 0.08), (0, 0.45)])
)

OUTLINES: dict[str, Field] = {
    "disk": _disk(0.88),
    "square": _box(0, 0, 0.76, 0.76),
    "triangle": _regular(3),
    "star": _regular(5, 0.42),
    "cross": _union(_box(0, 0, 0.92, 0.30), _box(0, 0, 0.30, 0.92)),
    "ring": _minus(_disk(0.95), _disk(0.50)),
    "crescent": _minus(_disk(0.95), _disk(0.75, 0.45, 0.0)),
    "heart": _HEART,
    "frame": _minus(_box(0, 0, 0.80, 0.80), _box(0, 0, 0.44, 0.44)),
    "plank": _box(0, 0, 0.98, 0.36),
    "pillar": _box(0, 0, 0.36, 0.98),
    "arrow": _union(_polygon([(-0.9, 0.0), (0.0, 0.98), (0.9, 0.0)]), _box(0, -0.45, 0.30, 0.5)),
    "flower": _petals(5, 0.25, 0.0),
    "gear": _petals(8, 0.15, 2.5),
    "dome": _polygon([(0.95 * np.cos(a), 1.3 * np.sin(a) - 0.55) for a in np.linspace(0, np.pi, 33)]),
    "hourglass": _polygon([(-0.8, 0.9), (-0.14, 0.0), (-0.8, -0.9), (0.8, -0.9), (0.14, 0.0), (0.8, 0.9)]),
    "drop": _union(_disk(0.62, 0, -0.3), _polygon([(-0.57, -0.06), (0.0, 0.98), (0.57, -0.06)])),
    "horseshoe": _union(
        _minus(_minus(_disk(0.92, 0, 0.05), _disk(0.48, 0, 0.05)), _box(0, -0.95, 0.48, 1.0)),
        _box(-0.70, -0.36, 0.22, 0.4),
        _box(0.70, -0.36, 0.22, 0.4),
    ),
    "zigzag": _polygon(
        [(-0.2, 0.98), (0.6, 0.98), (0.2, 0.25), (0.7, 0.25), (-0.35, -0.98), (-0.1, -0.1), (-0.65, -0.1)]
    ),
    "staircase": _polygon(
        [(-0.8, -0.8), (0.8, -0.8), (0.8, -0.25), (0.27, -0.25), (0.27, 0.27), (-0.27, 0.27), (-0.27, 0.8), (-0.8, 0.8)]
    ),
}


def _wave(t: np.ndarray) -> np.ndarray:
    """Return a square wave in [0, 1] of period 1, with soft edges so that it does not alias when drawn small."""
    return 0.5 + 0.5 * np.tanh(2.5 * np.sin(2 * np.pi * t))


def _dots(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    u, v = (x / _PERIOD) % 1 - 0.5, (y / _PERIOD) % 1 - 0.5
    return 0.5 - 0.5 * np.tanh(12 * (np.hypot(u, v) - 0.30))


def _speckles(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    noise = np.random.Generator(np.random.Philox(key=11)).random((32, 32)) < 0.32
    cell = SPAN / 32
    return noise[((y + 2) / cell).astype(int) % 32, ((x + 2) / cell).astype(int) % 32].astype(float)


# textures -> (pattern, whether it hangs on the object's center rather than being free to slide)
TEXTURES: dict[str, tuple[Field, bool]] = {
    "banded": (lambda x, y: _wave(y / _PERIOD), False),
    "striped": (lambda x, y: _wave(x / _PERIOD), False),
    "slanted": (lambda x, y: _wave((x + y) / _PERIOD), False),
    "checkered": (lambda x, y: _wave(0.5 + 0.25 * np.sign(np.sin(np.pi * 2 * x) * np.sin(np.pi * 2 * y))), False),
    "dotted": (_dots, False),
    "ringed": (lambda x, y: _wave(np.hypot(x, y) / 0.55 + 0.25), True),
    "speckled": (_speckles, False),
    "halved": (lambda x, y: 0.5 + 0.5 * np.tanh(10 * x), True),
    "capped": (lambda x, y: 0.5 + 0.5 * np.tanh(10 * (y - 0.15)), True),
    "shaded": (lambda x, y: np.clip(0.5 + 0.75 * y, 0, 1), True),
    "spoked": (lambda x, y: _wave(np.arctan2(y, x) * 3 / np.pi), True),
    "rimmed": (lambda x, y: np.zeros_like(x), True),  # the rim itself is drawn from the distance to the edge
}


def _grid(cells: int = CELLS) -> tuple[np.ndarray, np.ndarray]:
    """Return x and y of the cell centers, row 0 on top."""
    line = (np.arange(cells) + 0.5) / cells * SPAN - SPAN / 2
    return np.meshgrid(line, -line)


@cache
def distance_table() -> np.ndarray:
    """Return (shapes * CELLS * CELLS,) float32 signed distances in radii."""
    x, y = _grid()
    return np.stack([f(x, y) for f in OUTLINES.values()]).astype(np.float32).reshape(-1)


@cache
def radii_within(distance: float) -> float:
    """Bound how far from the center any outline may be within `distance` (in radii); infinite beyond the table."""
    x, y = _grid()
    near = distance_table().reshape(-1, CELLS, CELLS).min(0) < distance
    if near[[0, -1]].any() or near[:, [0, -1]].any():
        return np.inf
    return float(np.hypot(x, y)[near].max()) + SPAN / CELLS  # more than half a cell's diagonal


@cache
def texture_table() -> np.ndarray:
    """Return (textures * CELLS * CELLS,) float32 in [0, 1]: the share of the second color."""
    x, y = _grid()
    return np.stack([f(x, y) for f, _ in TEXTURES.values()]).astype(np.float32).reshape(-1)


def _smooth_noise(rng: np.random.Generator, sigma_y: float, sigma_x: float) -> np.ndarray:
    """Draw periodic Gaussian noise of unit variance, blurred in frequency space so that it tiles."""
    fy, fx = np.meshgrid(np.fft.fftfreq(CELLS), np.fft.rfftfreq(CELLS), indexing="ij")
    low = np.exp(-2 * np.pi**2 * ((sigma_y * fy) ** 2 + (sigma_x * fx) ** 2))
    noise = np.fft.irfft2(np.fft.rfft2(rng.standard_normal((CELLS, CELLS))) * low, s=(CELLS, CELLS))
    return noise / noise.std()


def _bricks() -> np.ndarray:
    row, column = np.meshgrid(np.arange(CELLS), np.arange(CELLS), indexing="ij")
    shifted = column + 16 * (row // 16 % 2)
    return np.where((row % 16 < 3) | (shifted % 32 < 3), 1.0, 0.0)


# ground -> (dark color, light color, blur down and across of its grain in table cells)
GROUNDS: dict[str, tuple[tuple[int, int, int], tuple[int, int, int], float, float]] = {
    "grass": ((38, 88, 30), (112, 158, 66), 9, 2),
    "sand": ((186, 158, 104), (226, 202, 150), 3, 3),
    "water": ((28, 70, 120), (92, 150, 190), 3, 14),
    "bricks": ((140, 66, 50), (196, 178, 164), 4, 4),
    "stone": ((84, 84, 88), (150, 150, 150), 14, 14),
    "wood": ((96, 60, 32), (164, 112, 66), 40, 4),
    "snow": ((196, 206, 216), (240, 244, 248), 20, 20),
    "slate": ((14, 14, 26), (52, 52, 74), 24, 24),
}


@cache
def ground_planes() -> np.ndarray:
    """Return (3, grounds * CELLS * CELLS) float32 RGB in 0..255, tileable."""
    rng = np.random.Generator(np.random.Philox(key=7))
    pictures = []
    for name, (dark, light, down, across) in GROUNDS.items():
        mix = 0.5 + 0.25 * _smooth_noise(rng, down, across) + 0.08 * _smooth_noise(rng, 2, 2)
        if name == "bricks":
            mix = 0.15 + 0.7 * _bricks() + 0.3 * (mix - 0.5)
        share = np.clip(mix, 0, 1)[..., None]
        pictures.append(np.array(dark) * (1 - share) + np.array(light) * share)
    return np.ascontiguousarray(np.stack(pictures).astype(np.float32).reshape(-1, 3).T)


@cache
def noise_table() -> np.ndarray:
    """Return (2**16,) float32 standard normal values, of which pixel noise is a window."""
    return np.random.Generator(np.random.Philox(key=5)).standard_normal(2**16).astype(np.float32)


@cache
def noise_windows(length: int) -> np.ndarray:
    """Return (2**16, length), a view: all windows of the table, which begins again after its end."""
    table = noise_table()
    return np.lib.stride_tricks.sliding_window_view(np.resize(table, len(table) + length - 1), length)
