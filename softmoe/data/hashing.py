"""One integer hash for everything that must be random and yet computable at any place on its own."""

from __future__ import annotations

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix64(z: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64: every bit of the result depends on every bit of `z`, a uint64 array (not a
    scalar: numpy warns of the intended overflow there)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniforms(key: int, indices: np.ndarray, count: int) -> np.ndarray:
    """(len(indices), count) float64 in [0, 1): splitmix64 of (key, index, column), a pure function of the
    three."""
    state = np.uint64(key) + mix64(indices.astype(np.uint64) + GOLDEN)
    columns = np.arange(1, count + 1, dtype=np.uint64) * GOLDEN
    return (mix64(state[:, None] + columns[None, :]) >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Dice:
    """Hands out columns of one table of uniform numbers, so that adding a draw at the end changes nothing
    before it."""

    def __init__(self, table: np.ndarray):
        self.table, self.used = table, 0

    def span(self, low: float | np.ndarray, high: float | np.ndarray) -> np.ndarray:
        column = self.table[:, self.used]
        self.used += 1
        return low + (high - low) * column

    def spans(self, low: tuple[float, ...], high: tuple[float, ...]) -> np.ndarray:
        """(B, n), the same as n columns one after the other."""
        first, self.used = self.used, self.used + len(low)
        return np.array(low) + (np.array(high) - np.array(low)) * self.table[:, first : self.used]

    def pick(self, count: int) -> np.ndarray:
        return self.span(0, count).astype(np.int64)
