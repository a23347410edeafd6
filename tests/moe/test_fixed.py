"""The paper's fixed routers against plain loops."""

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from softmoe.moe import (
    Experts,
    IdentityRouter,
    MoE,
    SoftUniformRouter,
    SparseRouting,
    UniformRouter,
    UniformSoftRouter,
)

SIZES = st.tuples(*[st.integers(1, high) for high in (3, 7, 5, 4, 3)])  # B, M, D, N, P
SEEDS = st.integers(0, 2**31)


def inputs(B: int, M: int, D: int, masked: bool) -> tuple[torch.Tensor, torch.Tensor | None, np.ndarray]:
    x = torch.randn(B, M, D, dtype=torch.float64)
    mask = torch.rand(B, M) < 0.6 if masked else None
    return x, mask, np.ones((B, M), bool) if mask is None else mask.numpy()


@given(SIZES, SEEDS, st.booleans())
def test_identity_equals_the_plain_loops(sizes, seed, masked):
    """Token i whole to expert i mod N, whatever the numbers are; none is dropped, masked ones get zero."""
    B, M, D, N, _ = sizes
    torch.manual_seed(seed)
    layer = MoE(IdentityRouter(D, N), Experts(D, 4, N)).double()
    x, mask, real = inputs(B, M, D, masked)
    kept = oracle.identity(B, M, N, real)
    expected = oracle.sparse_layer(x.numpy(), kept, oracle.ExpertWeights.of(layer.experts))
    torch.testing.assert_close(layer(x, mask).detach().numpy(), expected, rtol=1e-11, atol=1e-11)
    routing = layer.router(x, mask)
    assert isinstance(routing, SparseRouting)
    assert not routing.dropped.any()
    assert (routing.experts_per_token.numpy() == real).all()
    assert routing.load.sum() == real.sum()
    assert routing.auxiliary_loss == 0
    assert list(layer.router.parameters()) == []


def test_identity_with_as_many_experts_as_tokens_is_the_identity():
    """M = N: expert n gets token n of each image and nothing else."""
    x = torch.randn(2, 3, 4)
    slots = IdentityRouter(4, 3)(x).dispatch(x)
    assert torch.equal(slots, x.transpose(0, 1))


@pytest.mark.parametrize("kind", [UniformRouter, SoftUniformRouter, UniformSoftRouter])
@given(SIZES, SEEDS, st.booleans())
def test_uniform_ones_equal_the_plain_loops(kind, sizes, seed, masked):
    """Uniform halves are means over real tokens or over all slots; learned halves are those of soft routing."""
    B, M, D, N, P = sizes
    torch.manual_seed(seed)
    options = {} if kind is UniformRouter else {"scale_init": 4.0}
    layer = MoE(kind(D, N, P, **options), Experts(D, 4, N)).double()
    x, mask, real = inputs(B, M, D, masked)
    flat = np.zeros((B, M, N, P))
    learned = flat if kind is UniformRouter else oracle.soft_logits(x.numpy(), layer.router.phi.detach().numpy(), 4.0)
    dispatch = oracle.dispatch_weights(learned if kind is SoftUniformRouter else flat, real)
    combine = oracle.combine_weights(learned if kind is UniformSoftRouter else flat, real)
    expected = oracle.dense_layer(x.numpy(), dispatch, combine, oracle.ExpertWeights.of(layer.experts))
    torch.testing.assert_close(layer(x, mask).detach().numpy(), expected, rtol=1e-11, atol=1e-11)


def test_uniform_output_is_the_mean_expert_of_the_mean_token():
    """All tokens of an image get the same update, different between images."""
    layer = MoE(UniformRouter(4, 3, 2), Experts(4, 8, 3)).double()
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    mean = x.mean(1)
    expected = layer.experts(mean.expand(3, 2, 4)).mean(0)
    torch.testing.assert_close(layer(x), expected[:, None].expand(2, 5, 4))
    assert list(layer.router.parameters()) == []


@pytest.mark.parametrize(("kind", "learned"), [(SoftUniformRouter, "dispatch"), (UniformSoftRouter, "combine")])
def test_the_learned_half_gets_gradients(kind, learned):
    """The slot vectors learn through the half that is soft, and through that one only."""
    router = kind(4, 3, 2).double()
    routing = router(torch.randn(2, 5, 4, dtype=torch.float64))
    for name, weights in (("dispatch", routing.dispatch_weights), ("combine", routing.combine_weights)):
        assert weights.requires_grad == (name == learned)
