"""Experts Choice against plain loops."""

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from routers import assignments, gate_router

from softmoe.moe import Experts, ExpertsChoiceRouter, MoE

SEEDS = st.integers(0, 2**31)


@st.composite
def cases(draw):
    B, M, N = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 5))
    group_size = draw(st.one_of(st.none(), st.integers(1, 2 * M)))
    capacity = draw(st.one_of(st.none(), st.integers(1, group_size or M)))
    return B, M, N, {"group_size": group_size, "capacity": capacity}, draw(SEEDS)


@given(cases(), st.booleans())
def test_choices_equal_the_plain_loops_with_many_ties(case, masked):
    """Who is taken, for gates of few values: ties go to the earlier token, decreasing gates fill the buffer."""
    B, M, N, options, seed = case
    torch.manual_seed(seed)
    router = gate_router(ExpertsChoiceRouter, N, **options)
    logits = torch.randint(0, 2, (B, M, N)).double()
    mask = torch.rand(B, M) < 0.6 if masked else torch.ones(B, M, dtype=torch.bool)
    size = router.group_size or M
    routing = router(logits, mask if masked else None)
    gates_TN = router.compute_gates(logits, None).gates_GLN.flatten(0, 1)[: B * M].numpy()
    expected = oracle.experts_choice(gates_TN, mask.flatten().numpy(), size, router.capacity(size))
    assert sorted(assignments(routing, -(-B * M // size))) == sorted(expected)
    taken = np.bincount([token for token, *_ in expected], minlength=B * M)
    assert (routing.experts_per_token.flatten().numpy() == taken).all()
    assert (routing.dropped.flatten().numpy() == ((taken == 0) & mask.flatten().numpy())).all()
    assert routing.load.sum() == len(expected)


@given(cases(), st.booleans())
def test_output_equals_the_plain_loops(case, masked):
    """The whole layer: softmax over experts per token, raw gates, raw tokens."""
    B, M, N, options, seed = case
    torch.manual_seed(seed)
    layer = MoE(ExpertsChoiceRouter(3, N, **options), Experts(3, 5, N)).double().eval()
    x = torch.randn(B, M, 3, dtype=torch.float64)
    mask = torch.rand(B, M) < 0.6 if masked else torch.ones(B, M, dtype=torch.bool)
    logits = x.reshape(-1, 3).numpy() @ layer.router.weight.detach().numpy()
    gates = np.stack([oracle.softmax(row) for row in logits])
    size = layer.router.group_size or M
    kept = oracle.experts_choice(gates, mask.flatten().numpy(), size, layer.router.capacity(size))
    expected = oracle.sparse_layer(x.numpy(), kept, oracle.ExpertWeights.of(layer.experts))
    y = layer(x, mask if masked else None).detach()
    torch.testing.assert_close(y.numpy(), expected, rtol=1e-11, atol=1e-11)
    assert y[~mask].abs().sum() == 0


@given(cases())
def test_gradients_are_those_of_the_function(case):
    """Input and all parameter gradients equal finite differences."""
    B, M, N, options, seed = case
    torch.manual_seed(seed)
    layer = MoE(ExpertsChoiceRouter(3, N, **options), Experts(3, 5, N)).double().eval()
    names = [name for name, _ in layer.named_parameters()]

    def run(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    x = torch.randn(B, M, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(run, (x, *layer.parameters()), fast_mode=True)


@given(st.integers(1, 3), st.integers(2, 8), SEEDS)
def test_tokens_may_be_permuted(B, M, seed):
    """Without ties, permuted tokens give permuted outputs."""
    torch.manual_seed(seed)
    layer = MoE(ExpertsChoiceRouter(4, 3), Experts(4, 8, 3)).double().eval()
    x = torch.randn(B, M, 4, dtype=torch.float64)
    order = torch.randperm(M)
    torch.testing.assert_close(layer(x[:, order]), layer(x)[:, order])


def test_example_of_the_reference():
    """C = 2: expert 0 takes tokens (1, 0), experts 1 and 2 take (2, 1)."""
    gates = np.array([[0.4, 0.0, 0.2], [0.5, 0.1, 0.4], [0.3, 0.2, 0.6]])
    kept = oracle.experts_choice(gates, np.ones(3, bool), 3, 2)
    expected = [[1, 0], [2, 1], [2, 1]]
    assert [[t for t, n, *_ in kept if n == expert] for expert in range(3)] == expected
    # A fourth expert takes what is missing to 1 in each row, so that the softmax gives GATES times a constant.
    router = gate_router(ExpertsChoiceRouter, 4, capacity=2)
    rest = 1.2 - gates.sum(1, keepdims=True)
    logits = torch.from_numpy(np.log(np.concatenate([gates, rest], 1) + 1e-12))[None]
    routing = router(logits)
    assert routing.token_of_slot_NS[:3].tolist() == expected
    at_least = [(routing.experts_per_token >= count).double().mean().item() for count in (1, 2)]
    assert at_least[0] == 1.0
    assert at_least[1] >= 2 / 3
    np.testing.assert_allclose(routing.gate_NS[0].numpy(), np.array([0.5, 0.4]) / 1.2, rtol=1e-9)


@pytest.mark.parametrize(
    ("group", "factor", "experts", "capacity"), [(128, 2.0, 32, 8), (196, 1.0, 128, 2), (5, 1.0, 2, 2)]
)
def test_capacity(group, factor, experts, capacity):
    """round(L factor / N), half to even, at least 1."""
    assert ExpertsChoiceRouter(4, experts, capacity_factor=factor).capacity(group) == capacity


@given(cases())
def test_masked_tokens_are_never_taken(case):
    """Padding with strong gates is not chosen, nor counted as dropped; the real tokens are as if alone."""
    B, M, N, options, seed = case
    torch.manual_seed(seed)
    capacity = min(options["capacity"] or 1, M)
    router = gate_router(ExpertsChoiceRouter, N, capacity=capacity)
    x = torch.randn(B, M, N, dtype=torch.float64)
    padded = torch.cat([x, 50 * torch.randn(B, 3, N, dtype=torch.float64)], dim=1)
    mask = torch.arange(M + 3).expand(B, -1) < M
    alone, with_padding = router(x), router(padded, mask)
    assert (alone.experts_per_token == with_padding.experts_per_token[:, :M]).all()
    assert (with_padding.experts_per_token[:, M:] == 0).all()
    assert not with_padding.dropped[:, M:].any()
    torch.testing.assert_close(
        alone.combine(alone.dispatch(x)), with_padding.combine(with_padding.dispatch(padded))[:, :M]
    )


def test_slots_without_a_token_stay_empty():
    """Fewer real tokens than capacity: the other slots are empty, the counts say so."""
    router = gate_router(ExpertsChoiceRouter, 2, capacity=3)
    x = torch.randn(1, 4, 2, dtype=torch.float64)
    routing = router(x, torch.tensor([[True, False, False, False]]))
    assert routing.load.tolist() == [1, 1]
    assert routing.experts_per_token.tolist() == [[2, 0, 0, 0]]
    assert routing.dispatch(x)[:, 1:].abs().max() == 0


def test_a_real_token_with_a_vanished_gate_comes_before_a_masked_one():
    """Gates that underflow to 0 are no reason to take padding."""
    logits = torch.tensor([[[9.0, 0.0], [-5000.0, 0.0]]], dtype=torch.float64)
    routing = gate_router(ExpertsChoiceRouter, 2, capacity=1)(logits, torch.tensor([[False, True]]))
    assert routing.token_of_slot_NS.tolist() == [[1], [1]]


def test_noise_is_only_for_training_and_divided_by_the_experts():
    """Deviation noise_std / N in training, nothing in evaluation; no auxiliary loss either way."""
    router = ExpertsChoiceRouter(8, 16, noise_std=2.0).double()
    x = torch.randn(8, 64, 8, dtype=torch.float64)
    g = router.train().compute_gates(x, None)
    assert (g.noisy_GLN - g.logits_GLN).std().item() == pytest.approx(2.0 / 16, rel=0.03)
    assert router.eval().compute_gates(x, None).noise_scale == 0
    assert router.train()(x).auxiliary_loss == 0
