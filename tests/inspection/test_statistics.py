"""Every statistic equals a plain computation on all weights at once, however the images are cut into batches."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from softmoe.inspection.statistics import DenseStatistics, SparseStatistics, falling_sums
from softmoe.inspection.streaming import BANDS, CurveBands, Histogram, chosen_ranks
from softmoe.moe import DenseRouting, ExpertsChoiceRouter, IdentityRouter, SoftRouter, TokensChoiceRouter

B, M, N, P = 7, 9, 4, 2
S = N * P


def soft_routing(seed=0, images=B, sharp=3.0):
    logits = sharp * torch.randn(images, M, N, P, generator=torch.Generator().manual_seed(seed))
    return DenseRouting(logits.softmax(1), logits.flatten(2).softmax(2).view_as(logits))


def cut(routing, sizes):
    parts = zip(routing.dispatch_weights.split(sizes), routing.combine_weights.split(sizes), strict=True)
    return [DenseRouting(*part) for part in parts]


def streamed(routing, sizes):
    statistics = DenseStatistics(M, N, P)
    for part in cut(routing, sizes):
        statistics.add(part)
    return statistics.result()


def plain(routing):
    """Weights as float64 arrays (B, M, S)."""
    return (w.flatten(2).double().numpy() for w in (routing.dispatch_weights, routing.combine_weights))


def flat(value, path=""):
    """All numbers of a nested result, by their path."""
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flat(item, f"{path}/{key}").items()}
    if isinstance(value, list):
        return {k: v for i, item in enumerate(value) for k, v in flat(item, f"{path}/{i}").items()}
    return {path: value}


@settings(max_examples=20)
@given(st.lists(st.integers(1, B - 1), min_size=1, max_size=B))
def test_batches_do_not_matter(sizes):
    """Streaming equals whole: counts exactly, sums to rounding."""
    sizes = [*np.diff(np.unique([0, *np.cumsum(sizes).clip(0, B), B])).tolist()]
    routing = soft_routing()
    whole, parts = flat(streamed(routing, [B])), flat(streamed(routing, sizes))
    assert whole.keys() == parts.keys()
    for key, value in whole.items():
        assert parts[key] == (value if isinstance(value, str | int) else pytest.approx(value, rel=1e-12, abs=1e-12)), (
            key
        )


def test_token_mass():
    """Shares above 2 and up to 0.25, mean, ends and histogram of the summed dispatch weights."""
    routing = soft_routing()
    dispatch, _ = plain(routing)
    mass = dispatch.sum(2).ravel()
    found = streamed(routing, [3, 4])["token_mass"]
    assert found["above_2"] == (mass > 2).mean() > 0
    assert found["up_to_0.25"] == (mass <= 0.25).mean() > 0
    assert found["mean"] == pytest.approx(S / M)
    assert (found["smallest"], found["largest"]) == pytest.approx((mass.min(), mass.max()), rel=1e-6)
    counts, _ = np.histogram(mass, bins=1024, range=(0, 8))
    assert found["counts"] == counts[: len(found["counts"])].tolist()
    assert sum(found["counts"]) == B * M


def test_importance():
    """Mean combine weights per expert and slot, and the ratio of the largest to the smallest."""
    routing = soft_routing()
    _, combine = plain(routing)
    slots = combine.mean((0, 1))
    experts = slots.reshape(N, P).sum(1)
    found = streamed(routing, [1, 6])["importance"]
    assert found["slots"] == pytest.approx(slots)
    assert found["experts"] == pytest.approx(experts)
    assert sum(found["experts"]) == pytest.approx(1)
    assert found["max_over_min"] == pytest.approx(experts.max() / experts.min())
    assert found["effective_experts"] == pytest.approx(np.exp(-(experts * np.log(experts)).sum()))


@pytest.mark.parametrize("level", [0.5, 0.8, 0.9, 0.95])
def test_tokens_per_slot(level):
    """Tokens that make a share of a slot's weight, by sorting each slot alone."""
    routing = soft_routing()
    dispatch, _ = plain(routing)
    needed = np.empty((B, S), dtype=int)
    for b in range(B):
        for s in range(S):
            total, k = 0.0, 0
            for weight in sorted(dispatch[b, :, s], reverse=True):
                total, k = total + weight, k + 1
                if total >= level:
                    break
            needed[b, s] = k
    found = streamed(routing, [2, 5])["tokens_per_slot"]["levels"][str(level)]
    assert found["slots"] == pytest.approx(needed.mean(0))
    assert found["mean"] == pytest.approx(needed.mean())
    for q, value in found["quantiles"].items():
        assert value == np.quantile(needed, float(q), method="inverted_cdf")


def test_uniform_slots_take_their_share():
    """Half of 36 equal tokens make one half, whatever rounding says."""
    weights = torch.full((2, 36, 3, 1), 1 / 36)
    statistics = DenseStatistics(36, 3, 1)
    statistics.add(DenseRouting(weights, torch.full_like(weights, 1 / 3)))
    result = statistics.result()
    assert result["tokens_per_slot"]["levels"]["0.5"]["slots"] == [18.0] * 3
    assert result["dispatch"]["effective_share"] == pytest.approx(1)
    assert result["combine"]["effective"] == pytest.approx(3)
    assert result["dispatch_curve"]["mean"] == pytest.approx((np.arange(36) + 1) / 36)


def test_sharpness():
    """Mean largest weight, entropy and exp(entropy) of slots and tokens; entropy of each slot over the images."""
    routing = soft_routing()
    dispatch, combine = plain(routing)
    result = streamed(routing, [4, 3])
    for found, weights, axis in ((result["dispatch"], dispatch, 1), (result["combine"], combine, 2)):
        entropy = -(weights * np.log(weights)).sum(axis)
        assert found["mean_largest"] == pytest.approx(weights.max(axis).mean())
        assert found["entropy"] == pytest.approx(entropy.mean(), rel=1e-6)
        assert found["effective"] == pytest.approx(np.exp(entropy).mean(), rel=1e-6)
        assert found["effective_share"] == pytest.approx(np.exp(entropy).mean() / weights.shape[axis], rel=1e-6)
    entropy = -(dispatch * np.log(dispatch)).sum(1)
    assert result["slot_entropy"] == pytest.approx(entropy.mean(0), rel=1e-6)


@pytest.mark.parametrize("kind", ["dispatch", "combine"])
def test_curves_and_bands(kind):
    """Mean cumulative curves exactly; the edges of the bands within one bin of the order statistics."""
    routing = soft_routing(images=200)
    dispatch, combine = plain(routing)
    rows = dispatch.transpose(0, 2, 1).reshape(-1, M) if kind == "dispatch" else combine.reshape(-1, S)
    sums = np.cumsum(-np.sort(-rows, axis=1), axis=1)
    found = streamed(routing, [150, 50])[f"{kind}_curve"]
    assert found["ranks"] == list(range(1, sums.shape[1] + 1))
    assert found["mean"] == pytest.approx(sums.mean(0), abs=1e-6)
    for share in BANDS:
        for edge, q in zip(found["bands"][str(share)], ((1 - share) / 2, (1 + share) / 2), strict=True):
            exact = np.quantile(sums, q, axis=0, method="inverted_cdf")
            assert edge == pytest.approx(exact, abs=1 / 500 + 1e-9)


def test_slot_curves():
    """Each slot's mean cumulative curve."""
    routing = soft_routing()
    dispatch, _ = plain(routing)
    sums = np.cumsum(-np.sort(-dispatch, axis=1), axis=1)
    found = np.array(streamed(routing, [7])["tokens_per_slot"]["curves"])
    np.testing.assert_allclose(found.T, sums.mean(0), atol=1e-6)


def test_padding_is_left_out():
    """Tokens behind a mask, and images of padding alone, change nothing."""
    router, x = SoftRouter(6, N, P), torch.randn(3, M, 6)
    padded = torch.cat([x, torch.randn(3, 4, 6)], 1)
    mask = torch.arange(M + 4).expand(3, -1) < M
    empty = torch.zeros(1, M + 4, dtype=torch.bool)
    with torch.no_grad():
        short = DenseStatistics(M, N, P)
        short.add(router(x))
        long = DenseStatistics(M + 4, N, P)
        long.add(router(torch.cat([padded, torch.randn(1, M + 4, 6)]), torch.cat([mask, empty])))
    one, two = short.result(), long.result()
    for key in ("token_mass", "importance", "slot_entropy"):
        assert flat(one[key]) == pytest.approx(flat(two[key]), rel=1e-5)
    assert one["dispatch"]["effective"] == pytest.approx(two["dispatch"]["effective"], rel=1e-5)
    assert one["combine"] == pytest.approx(two["combine"], rel=1e-5)


def test_one_size_at_a_time():
    """Another number of tokens than in the first batch is one clear sentence."""
    statistics = DenseStatistics(M + 1, N, P)
    with pytest.raises(ValueError, match="expected images of 10 tokens as in the first batch, got 9"):
        statistics.add(soft_routing())


@pytest.mark.parametrize("make", [TokensChoiceRouter, ExpertsChoiceRouter, IdentityRouter])
def test_sparse(make):
    """Drop share, load, places filled and experts per token, counted token by token; streaming equals whole."""
    router, x = make(6, 5).eval(), torch.randn(8, 12, 6)
    with torch.no_grad():
        routings = [router(part) for part in x.split(3)]
    statistics = SparseStatistics(5)
    copies, load, places = [], np.zeros(5), 0
    for routing in routings:
        statistics.add(routing)
        here = dict.fromkeys(range(routing.mask_T.numel()), 0)
        for n, row in enumerate(routing.token_of_slot_NS.tolist()):
            for token in row:
                places += 1
                if token in here:
                    here[token] += 1
                    load[n] += 1
        copies += here.values()
    copies = np.array(copies)
    result = statistics.result()
    assert result["dropped"] == (copies == 0).mean()
    assert result["load"] == pytest.approx(load / load.sum())
    assert result["filled"] == load.sum() / places
    assert result["idle_experts"] == (load == 0).mean()
    assert result["experts_per_token"] == pytest.approx(np.bincount(copies) / len(copies))
    gates = sum(routing.gate_NS.double().sum(1).numpy() for routing in routings)
    assert result["importance"]["experts"] == pytest.approx(gates / len(copies))
    assert result["tokens"] == 12


@given(st.lists(st.floats(-1, 9), min_size=1, max_size=50))
def test_histogram(values):
    """Bins as numpy's; what lies outside is in the first and last."""
    histogram = Histogram(0.0, 8.0, 16)
    for value in values:
        histogram.add(np.array([value]))
    counts, _ = np.histogram(np.clip(values, 0, 8), bins=16, range=(0, 8))
    assert histogram.counts.tolist() == counts.tolist()
    assert (histogram.smallest, histogram.largest) == (min(values), max(values))
    assert histogram.total == len(values)


def test_long_rows_are_thinned():
    """Up to 256 ranks are kept, both ends among them; the rows' curves are those at these ranks."""
    ranks = chosen_ranks(1000)
    assert len(ranks) == 256
    assert (ranks[0], ranks[-1]) == (1, 1000)
    assert np.all(np.diff(ranks) > 0)
    bands = CurveBands(1000)
    sums, largest = falling_sums(np.random.default_rng(0).random((3, 1000)))
    bands.add(sums)
    assert bands.mean == pytest.approx(sums[:, ranks - 1].mean(0))
    assert bands.mean[-1] == pytest.approx(1)
