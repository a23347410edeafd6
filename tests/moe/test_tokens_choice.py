"""Tokens Choice against plain loops: choices, capacity, priority, groups and masks."""

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from routers import assignments, gate_router

from softmoe.moe import Experts, MoE, TokensChoiceRouter
from softmoe.moe.sparse import buffer_positions, top_k_first

SEEDS = st.integers(0, 2**31)


@st.composite
def cases(draw):
    """Shapes, options and a seed of one routing problem; groups may span images and need not divide the batch."""
    B, M, N = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 5))
    options = {
        "top_k": draw(st.integers(1, N)),
        "batch_priority": draw(st.booleans()),
        "group_size": draw(st.one_of(st.none(), st.integers(1, 2 * M))),
        "capacity": draw(st.one_of(st.none(), st.integers(1, 4))),
    }
    return B, M, N, options, draw(SEEDS)


def plain_choice(router: TokensChoiceRouter, gates_TN: np.ndarray, mask_T: np.ndarray, size: int):
    capacity = router.capacity(size, router.top_k)
    return oracle.tokens_choice(gates_TN, mask_T, size, router.top_k, capacity, router.batch_priority)


@given(cases(), st.booleans())
def test_choices_equal_the_plain_loops_with_many_ties(case, masked):
    """Who gets which place, for gates of few values: ties go to the lower expert and the earlier token."""
    B, M, N, options, seed = case
    torch.manual_seed(seed)
    router = gate_router(TokensChoiceRouter, N, **options)
    logits = torch.randint(0, 2, (B, M, N)).double()
    mask = torch.rand(B, M) < 0.6 if masked else torch.ones(B, M, dtype=torch.bool)
    size = router.group_size or M
    routing = router(logits, mask if masked else None)
    gates_TN = router.compute_gates(logits, None).gates_GLN.flatten(0, 1)[: B * M].numpy()
    expected = plain_choice(router, gates_TN, mask.flatten().numpy(), size)
    assert sorted(assignments(routing, -(-B * M // size))) == sorted(expected)

    taken = np.zeros(B * M, dtype=int)
    load = np.zeros(N, dtype=int)
    for token, expert, _, _ in expected:
        taken[token] += 1
        load[expert] += 1
    assert (routing.experts_per_token.flatten().numpy() == taken).all()
    assert (routing.load.numpy() == load).all()
    assert (routing.dropped.flatten().numpy() == ((taken == 0) & mask.flatten().numpy())).all()


@given(cases(), st.booleans())
def test_output_equals_the_plain_loops(case, masked):
    """The whole layer: raw tokens, raw gates (softmax over experts, before the choice, never normalized again)."""
    B, M, N, options, seed = case
    torch.manual_seed(seed)
    layer = MoE(TokensChoiceRouter(3, N, **options), Experts(3, 5, N)).double().eval()
    x = torch.randn(B, M, 3, dtype=torch.float64)
    mask = torch.rand(B, M) < 0.6 if masked else torch.ones(B, M, dtype=torch.bool)
    logits = x.reshape(-1, 3).numpy() @ layer.router.weight.detach().numpy()
    gates = np.stack([oracle.softmax(row) for row in logits])
    kept = plain_choice(layer.router, gates, mask.flatten().numpy(), layer.router.group_size or M)
    expected = oracle.sparse_layer(x.numpy(), kept, oracle.ExpertWeights.of(layer.experts))
    y = layer(x, mask if masked else None).detach()
    torch.testing.assert_close(y.numpy(), expected, rtol=1e-11, atol=1e-11)
    assert y[~mask].abs().sum() == 0


@given(cases())
def test_gradients_are_those_of_the_function(case):
    """Input and all parameter gradients equal finite differences; the router learns through gates and losses."""
    B, M, N, options, seed = case
    torch.manual_seed(seed)
    router = TokensChoiceRouter(3, N, gshard_weight=0.3, importance_weight=0.7, **options)
    layer = MoE(router, Experts(3, 5, N)).double().eval()
    names = [name for name, _ in layer.named_parameters()]

    def run(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    def loss(x, weight):
        return torch.func.functional_call(router, {"weight": weight}, (x,)).auxiliary_loss

    x = torch.randn(B, M, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(run, (x, *layer.parameters()), fast_mode=True)
    assert torch.autograd.gradcheck(loss, (x, router.weight), fast_mode=True)


GATES = [[0.4, 0.0, 0.2], [0.5, 0.1, 0.4], [0.3, 0.2, 0.6]]  # the reference's own example; rows need not sum to 1
IN_ORDER = [(0, 0, 0), (0, 2, 1), (1, 0, 1), (2, 2, 0)]
BY_PRIORITY = [(0, 0, 1), (1, 0, 0), (1, 2, 1), (2, 2, 0)]


@pytest.mark.parametrize(("batch_priority", "expected"), [(False, IN_ORDER), (True, BY_PRIORITY)])
def test_buffer_example_of_the_reference(batch_priority, expected):
    """K = 2, C = 2: what is kept as (token, expert, place), in order and with batch priority."""
    kept = oracle.tokens_choice(np.array(GATES), np.ones(3, bool), 3, 2, 2, batch_priority)
    assert sorted(item[:3] for item in kept) == expected
    gates = torch.tensor(GATES)[None]
    gate_GLK, expert_GLK = top_k_first(gates, 2)
    place = buffer_positions(
        expert_GLK, gate_GLK[..., 0] if batch_priority else None, torch.ones(1, 3, dtype=torch.bool)
    )
    found = [
        (t, int(expert_GLK[0, t, k]), int(place[0, t, k])) for t in range(3) for k in range(2) if place[0, t, k] < 2
    ]
    assert sorted(found) == expected


def test_batch_priority_saves_the_important_tokens():
    """With room for one token, order keeps the first and priority the surest."""
    logits = torch.tensor([[[1.0, 0.0], [5.0, 0.0], [3.0, 0.0]]], dtype=torch.float64)
    for batch_priority, survivor in ((False, 0), (True, 1)):
        routing = gate_router(TokensChoiceRouter, 2, capacity=1, batch_priority=batch_priority)(logits)
        assert [not dropped for dropped in routing.dropped[0].tolist()] == [t == survivor for t in range(3)]


def test_first_choices_come_before_second_ones():
    """A token with a weak first choice beats a token with a strong second choice."""
    logits = torch.tensor([[[5.0, 4.9, -9.0], [0.0, 0.1, -9.0]]], dtype=torch.float64)
    routing = gate_router(TokensChoiceRouter, 3, top_k=2, capacity=1)(logits)
    assert routing.token_of_slot_NS[:2, 0].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("group", "top_k", "factor", "experts", "options", "capacity"),
    [
        (32, 2, 1.0, 32, {}, 2),
        (32, 2, 1.0, 32, {"capacity_rounding": "ceil", "capacity_multiple_of": 4}, 4),
        (196, 1, 1.0, 32, {}, 6),
        (196, 1, 1.0, 128, {}, 2),
        (196, 1, 1.0, 256, {}, 1),
        (196, 1, 1.0, 512, {}, 1),
        (196, 1, 1.0, 512, {"capacity_multiple_of": 4}, 4),
        (49, 1, 1.0, 32, {}, 2),
        (5, 1, 1.0, 2, {}, 2),
        (7, 1, 1.0, 2, {}, 4),
        (3, 1, 1.0, 2, {}, 2),
        (5, 1, 1.0, 2, {"capacity_rounding": "ceil"}, 3),
        (1, 1, 1.0, 2, {}, 1),
        (576, 1, 1.125, 128, {}, 5),
        (10, 1, 1.0, 2, {"capacity": 3}, 3),
    ],
)
def test_capacity(group, top_k, factor, experts, options, capacity):
    """round(L K factor / N), half to even, at least 1; or ceil; or up to a multiple; or as given."""
    router = TokensChoiceRouter(4, experts, top_k=top_k, capacity_factor=factor, **options)
    assert router.capacity(group, top_k) == capacity


@given(st.integers(1, 4), st.integers(1, 6), st.integers(2, 4), SEEDS)
def test_groups_are_independent(groups, size, N, seed):
    """Routing in groups of one image's tokens equals routing image by image."""
    torch.manual_seed(seed)
    x = torch.randn(groups, size, N, dtype=torch.float64)
    together = gate_router(TokensChoiceRouter, N, group_size=size)(x)
    for g in range(groups):
        alone = gate_router(TokensChoiceRouter, N)(x[g : g + 1])
        assert (together.experts_per_token[g] == alone.experts_per_token[0]).all()


def test_groups_may_span_images():
    """One group of two images shares capacity: the surer image takes it all."""
    logits = torch.tensor([[[1.0, 0.0], [2.0, 0.0]], [[7.0, 0.0], [6.0, 0.0]]], dtype=torch.float64)
    apart = gate_router(TokensChoiceRouter, 2, capacity=1)(logits)
    shared = gate_router(TokensChoiceRouter, 2, capacity=2, group_size=4)(logits)
    assert apart.dropped.tolist() == [[True, False], [False, True]]
    assert shared.dropped.tolist() == [[True, True], [False, False]]


@given(cases())
def test_masked_tokens_take_no_capacity(case):
    """Padding at the end of each image, with strong gates, leaves the real tokens' routing as it was."""
    B, M, N, options, seed = case
    torch.manual_seed(seed)
    options |= {"group_size": None, "capacity": 2}
    router = gate_router(TokensChoiceRouter, N, **options)
    x = torch.randn(B, M, N, dtype=torch.float64)
    padded = torch.cat([x, 50 * torch.randn(B, 3, N, dtype=torch.float64)], dim=1)
    mask = torch.arange(M + 3).expand(B, -1) < M
    alone, with_padding = router(x), router(padded, mask)
    assert (alone.experts_per_token == with_padding.experts_per_token[:, :M]).all()
    assert (with_padding.experts_per_token[:, M:] == 0).all()
    assert not with_padding.dropped[:, M:].any()
    torch.testing.assert_close(alone.auxiliary_loss, with_padding.auxiliary_loss)
    torch.testing.assert_close(
        alone.combine(alone.dispatch(x)), with_padding.combine(with_padding.dispatch(padded))[:, :M]
    )


def test_noise_is_only_for_training_and_divided_by_the_experts():
    """Gate noise has deviation noise_std / N in training and is absent in evaluation."""
    router = TokensChoiceRouter(8, 16, noise_std=2.0).double()
    g = router.train().compute_gates(torch.randn(8, 64, 8, dtype=torch.float64), None)
    assert (g.noisy_GLN - g.logits_GLN).std().item() == pytest.approx(2.0 / 16, rel=0.03)
    torch.testing.assert_close(g.gates_GLN, g.noisy_GLN.softmax(-1))
    g = router.eval().compute_gates(torch.randn(8, 64, 8, dtype=torch.float64), None)
    assert g.noise_scale == 0
    assert torch.equal(g.noisy_GLN, g.logits_GLN)


@given(cases())
def test_training_loss_equals_the_plain_loops(case):
    """Importance (clean gates), load (noisy thresholds) and gshard (noisy gates), averaged over groups."""
    B, M, N, options, seed = case
    torch.manual_seed(seed)
    router = TokensChoiceRouter(
        N, N, noise_std=1.5, importance_weight=0.3, load_weight=0.2, gshard_weight=0.1, **options
    ).double()
    x = torch.randn(B, M, N, dtype=torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        found = router(x).auxiliary_loss.item()
    torch.manual_seed(1)
    g = router.compute_gates(x, None)
    logits, noisy = (tensor.detach().flatten(0, 1)[: B * M].numpy() for tensor in (g.logits_GLN, g.noisy_GLN))
    clean, gates = (np.stack([oracle.softmax(row) for row in rows]) for rows in (logits, noisy))
    losses = [
        0.3 * oracle.importance_loss(clean[group])
        + 0.2 * oracle.load_loss(logits[group], noisy[group], 1.5 / N, router.top_k)
        + 0.1 * oracle.gshard_loss(gates[group])
        for group in oracle.token_groups(B * M, router.group_size or M)
    ]
    assert found == pytest.approx(np.mean(losses), rel=1e-9)


def test_evaluation_has_no_load_loss_and_zero_weights_no_loss():
    """Load is a statement about noise; without noise, or weight, it is not in the sum."""
    x = torch.randn(2, 6, 4, dtype=torch.float64)
    quiet = TokensChoiceRouter(4, 3, importance_weight=0.0, load_weight=1.0).double()
    assert quiet.eval()(x).auxiliary_loss == 0
    assert quiet.train()(x).auxiliary_loss > 0
    assert TokensChoiceRouter(4, 3, importance_weight=0.0, load_weight=0.0).double()(x).auxiliary_loss == 0


def test_a_batch_without_real_tokens_is_finite():
    """All masked: zero output, nothing dropped, finite loss and gradients."""
    layer = MoE(TokensChoiceRouter(4, 3, gshard_weight=1.0), Experts(4, 8, 3)).double()
    x = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.zeros(2, 5, dtype=torch.bool)
    routing = layer.router(x, mask)
    y = layer(x, mask)
    assert y.abs().max() == 0
    assert not routing.dropped.any()
    assert routing.load.sum() == 0
    (y.sum() + routing.auxiliary_loss).backward()
    for tensor in (x, *layer.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
