"""The order of examples in the endless stream: a pure function of (length, seed, step, batch size, world, rank).

The stream is one permutation of the data after another. A permutation is not stored but computed at the
places asked for, by a Feistel network with cycle walking (Black & Rogaway 2002), so a step costs O(batch) at
any length, a resume costs nothing, and no worker has to know what another one did. The integer hash behind it
serves everything that must be random and yet computable at any place on its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix64(z: np.ndarray) -> np.ndarray:
    """Hash a uint64 array by the finalizer of splitmix64: every bit of the result depends on every bit of `z`.

    It takes no scalars, for which numpy warns of the intended overflow.
    """
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniforms(key: int, indices: np.ndarray, count: int) -> np.ndarray:
    """Draw (len(indices), count) float64 in [0, 1): splitmix64 of (key, index, column), a pure function of them."""
    state = np.uint64(key) + mix64(indices.astype(np.uint64) + GOLDEN)
    columns = np.arange(1, count + 1, dtype=np.uint64) * GOLDEN
    return (mix64(state[:, None] + columns[None, :]) >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Dice:
    """Hands out columns of one table of uniform numbers, so that adding a draw at the end changes nothing before it."""

    def __init__(self, table: np.ndarray):
        self.table, self.used = table, 0

    def span(self, low: float | np.ndarray, high: float | np.ndarray) -> np.ndarray:
        column = self.table[:, self.used]
        self.used += 1
        return low + (high - low) * column

    def spans(self, low: tuple[float, ...], high: tuple[float, ...]) -> np.ndarray:
        """Draw (B, n), the same as n columns one after the other."""
        first, self.used = self.used, self.used + len(low)
        return np.array(low) + (np.array(high) - np.array(low)) * self.table[:, first : self.used]

    def pick(self, count: int) -> np.ndarray:
        return self.span(0, count).astype(np.int64)


_ROUNDS = 6


def order(
    length: int,
    seed: int,
    step: int,
    batch_size: int,
    world: int = 1,
    rank: int = 0,
    blocks: Sequence[int] | None = None,
    mix: int = 8,
) -> np.ndarray:
    """Return the examples of step `step` on process `rank`: (batch_size // world,) int64.

    `batch_size` counts the whole batch over all `world` processes; together the ranks hold exactly the batch
    that one process would. With `blocks` (shard sizes that sum to `length`) an epoch visits the shards in
    random order, `mix` of them at a time, and shuffles within those: reads stay near each other on disk.
    """
    check_batch(batch_size, world, rank)
    if length < 1:
        raise ValueError("The data set is empty: there is no order of 0 examples.")
    share = batch_size // world
    places = np.arange(share, dtype=np.int64) + (step * batch_size + rank * share)
    epochs, within = places // length, places % length
    if blocks is None:
        return permute(within, length, _keys(seed, epochs))
    result = np.empty_like(within)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        result[here] = _by_blocks(within[here], blocks, seed, int(epoch), mix)
    return result


def check_batch(batch_size: int, world: int, rank: int, *, even: bool = True) -> None:
    """Raise ValueError for a batch that these processes cannot share, evenly if asked."""
    if batch_size < 1:
        raise ValueError(f"The batch must have at least 1 image, got {batch_size}.")
    if world < 1 or not 0 <= rank < world:
        raise ValueError(f"Need 0 <= rank < world, not {world=}, {rank=}.")
    if even and batch_size % world:
        raise ValueError(
            f"The batch of {batch_size} images cannot be shared evenly by {world} processes; "
            f"take a multiple of {world}, for example {-(-batch_size // world) * world}."
        )


def permute(places: np.ndarray, length: int, keys: np.ndarray) -> np.ndarray:
    """Permute `places` (each in 0..length-1) by the permutations of 0..length-1 chosen by `keys` (uint64)."""
    half = max(1, ((length - 1).bit_length() + 1) // 2)  # the network permutes 0 .. 2**(2 * half) - 1
    result = _feistel(places.astype(np.uint64), keys, half)
    outside = np.flatnonzero(result >= length)
    while outside.size:  # walk on until inside: still a permutation, at most 4 tries on average
        result[outside] = _feistel(result[outside], keys[outside], half)
        outside = outside[result[outside] >= length]
    return result.astype(np.int64)


def _feistel(values: np.ndarray, keys: np.ndarray, half: int) -> np.ndarray:
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    left, right = values >> shift, values & mask
    rounds = np.arange(_ROUNDS, dtype=np.uint64) * GOLDEN
    for k in range(_ROUNDS):
        left, right = right, left ^ (mix64(right + keys + rounds[k]) & mask)
    return (left << shift) | right


def _keys(seed: int, epochs: np.ndarray) -> np.ndarray:
    base = mix64(np.array([seed % 2**64], dtype=np.uint64) + GOLDEN)
    return mix64(base + (epochs.astype(np.uint64) + np.uint64(1)) * GOLDEN)


def _by_blocks(places: np.ndarray, blocks: Sequence[int], seed: int, epoch: int, mix: int) -> np.ndarray:
    """Return the examples at these places of one epoch: shards in random order, `mix` of them shuffled together."""
    sizes = np.asarray(blocks, dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    key = _keys(seed, np.array([epoch]))
    visit = permute(np.arange(len(sizes)), len(sizes), np.repeat(key, len(sizes)))
    result = np.empty_like(places)
    first = 0
    for start in range(0, len(visit), mix):
        together = visit[start : start + mix]
        total = int(sizes[together].sum())
        here = np.flatnonzero((places >= first) & (places < first + total))
        if here.size:
            inside = permute(places[here] - first, total, np.repeat(key + np.uint64(start + 1), here.size))
            ends = np.cumsum(sizes[together])
            which = np.searchsorted(ends, inside, side="right")
            result[here] = starts[together[which]] + inside - (ends[which] - sizes[together[which]])
        first += total
    return result
