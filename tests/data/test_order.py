"""The order of examples: permutations, shared by ranks, resumable at any step."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from softmoe.data.order import order

lengths = st.integers(1, 150)
seeds = st.integers(0, 2**63)


def _stream(length, seed, batch_size, steps, **how):
    return np.concatenate([order(length, seed, s, batch_size, **how) for s in range(steps)])


@given(lengths, seeds, st.integers(1, 40))
def test_each_epoch_is_a_permutation(length, seed, batch_size):
    """Whatever the batch size, the stream is one permutation of all examples after another."""
    stream = _stream(length, seed, batch_size, -(-2 * length // batch_size))
    for epoch in range(2):
        assert sorted(stream[epoch * length : (epoch + 1) * length]) == list(range(length))


@given(lengths, seeds, st.integers(0, 10**9), st.integers(1, 6), st.integers(1, 5))
def test_ranks_partition_the_batch(length, seed, step, share, world):
    """The shares of all ranks, one after another, are the batch of one process."""
    whole = order(length, seed, step, share * world)
    shares = [order(length, seed, step, share * world, world, rank) for rank in range(world)]
    assert np.array_equal(np.concatenate(shares), whole)


@given(lengths, seeds, st.integers(1, 16))
def test_stream_does_not_depend_on_batch_size(length, seed, batch_size):
    """The stream is one sequence; a batch is a window of it."""
    stream = _stream(length, seed, batch_size, 5)
    assert np.array_equal(stream, order(length, seed, 0, 5 * batch_size))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), seeds, st.integers(1, 4), st.integers(1, 17))
def test_shards(blocks, seed, mix, batch_size):
    """By shards, each epoch is still a permutation, and at any time only `mix` shards are being read."""
    length = sum(blocks)
    stream = _stream(length, seed, batch_size, -(-2 * length // batch_size), blocks=blocks, mix=mix)
    shard_of = np.repeat(np.arange(len(blocks)), blocks)
    for epoch in range(2):
        part = stream[epoch * length : (epoch + 1) * length]
        assert sorted(part) == list(range(length))
        shards = shard_of[part]
        first = np.array([np.flatnonzero(shards == s)[0] for s in range(len(blocks))])
        last = np.array([np.flatnonzero(shards == s)[-1] for s in range(len(blocks))])
        assert all(((first <= place) & (last >= place)).sum() <= mix for place in range(length))


def test_epochs_and_seeds_differ():
    """No two epochs or seeds share an order."""
    orders = [tuple(order(1000, seed, step, 1000)) for seed in (0, 1, 2) for step in (0, 1, 2)]
    assert len(set(orders)) == 9


def test_well_mixed():
    """Neighbors, parity and halves of the data are spread as in a random permutation (within 5 standard errors)."""
    n = 4096
    place = order(n, 3, 0, n).astype(float)
    correlation = np.corrcoef(place, np.arange(n))[0, 1]
    assert abs(correlation) < 5 / np.sqrt(n)
    assert abs(np.corrcoef(place[1:], place[:-1])[0, 1]) < 5 / np.sqrt(n)
    assert abs((place[: n // 2] >= n / 2).mean() - 0.5) < 5 * 0.5 / np.sqrt(n)


def test_uniform_over_permutations_of_four():
    """All 24 orders of four examples occur about equally often over seeds."""
    counts: dict[tuple, int] = {}
    for seed in range(2400):
        key = tuple(order(4, seed, 0, 4).tolist())
        counts[key] = counts.get(key, 0) + 1
    assert len(counts) == 24
    assert max(counts.values()) < 175
    assert min(counts.values()) > 45


def test_huge_lengths_cost_nothing():
    """A billion examples are no array: distinct, in range, far into the run."""
    indices = order(2**30 - 7, 1, 10**6, 4096)
    assert len(set(indices.tolist())) == 4096
    assert 0 <= indices.min() < indices.max() < 2**30 - 7


def test_golden():
    """The order of a released version never changes: runs resume across versions."""
    assert order(10, 0, 0, 10).tolist() == GOLDEN_TEN
    assert order(50_000, 7, 1234, 6).tolist() == GOLDEN_MANY


GOLDEN_TEN = [4, 0, 7, 3, 1, 9, 2, 6, 8, 5]
GOLDEN_MANY = [16227, 16936, 44657, 10083, 30216, 30228]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((10, 0, 0, 10, 3), "multiple of 3, for example 12"),
        ((0, 0, 0, 1), "empty"),
        ((5, 0, 0, 0), "at least 1"),
        ((5, 0, 0, 4, 2, 2), "rank"),
    ],
)
def test_mistakes(arguments, words):
    """Sizes that do not fit are named."""
    with pytest.raises(ValueError, match=words):
        order(*arguments)
