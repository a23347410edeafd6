"""Weights in bytes are the weights, to half a step; slots chosen to be shown differ."""

import numpy as np
import pytest
import torch

from softmoe.inspection.collect import Steps, compress, different_slots, evenly
from softmoe.moe import (
    ExpertsChoiceRouter,
    IdentityRouter,
    SoftRouter,
    SoftUniformRouter,
    TokensChoiceRouter,
    UniformRouter,
    UniformSoftRouter,
)

D, N, M = 8, 5, 12


@pytest.mark.parametrize("scale", [0.1, 3.0, 40.0])
@pytest.mark.parametrize("make", [SoftRouter, SoftUniformRouter, UniformSoftRouter])
def test_soft_weights(make, scale):
    """Dispatch and combine come back with a relative error of half a step; a Soft router needs one table for both."""
    router, x = make(D, N, 2, scale_init=scale).eval(), torch.randn(1, M, D)
    with torch.no_grad():
        routing = router(x)
    packed = compress(routing)
    assert (packed.combine is None) == (make is SoftRouter)
    allowed = np.expm1(1.1 * packed.dispatch.rest_MS.step + (packed.combine.rest_MS.step if packed.combine else 0))
    for found, true in (
        (packed.dispatch_MS(), routing.dispatch_weights),
        (packed.combine_MS(), routing.combine_weights),
    ):
        exact = true[0].flatten(1).double().numpy()
        assert np.abs(found - exact).max() <= allowed * exact.max()
        assert found == pytest.approx(exact, rel=allowed, abs=1e-9)


def test_uniform():
    """Uniform weights are exact."""
    packed = compress(UniformRouter(D, N)(torch.randn(1, M, D)))
    assert packed.dispatch_MS() == pytest.approx(np.full((M, N), 1 / M))
    assert packed.combine_MS() == pytest.approx(np.full((M, N), 1 / N))


@pytest.mark.parametrize("make", [TokensChoiceRouter, ExpertsChoiceRouter, IdentityRouter])
def test_sparse_assignments(make):
    """Which expert holds which token, exactly; gates to a step of one 255th."""
    router, x = make(D, N).eval(), torch.randn(1, M, D)
    with torch.no_grad():
        routing = router(x)
    held, gates = np.zeros((M, N)), np.zeros((M, N))
    for n, row in enumerate(routing.token_of_slot_NS.tolist()):
        for place, token in enumerate(row):
            if token < M:
                held[token, n] = 1
                gates[token, n] = routing.gate_NS[n, place].item()
    packed = compress(routing)
    assert packed.dispatch_MS() == pytest.approx(held)
    assert packed.combine_MS() == pytest.approx(gates, abs=0.5 / 255)


def test_coarser_steps_keep_the_ends():
    """Fewer levels: the largest and smallest stay, the rest is off by half a step at most."""
    values = np.random.default_rng(0).normal(size=(30, 30))
    fine = Steps.of(values, 255)
    for levels in (127, 63, 15):
        coarse = fine.coarser(levels)
        assert coarse.codes.max() == levels
        assert (coarse.values().min(), coarse.values().max()) == pytest.approx((values.min(), values.max()))
        assert np.abs(coarse.values() - fine.values()).max() <= coarse.step / 2 + 1e-9
    constant = Steps.of(np.full((2, 2), 3.0), 255)
    assert constant.values() == pytest.approx(np.full((2, 2), 3.0))


def test_different_slots():
    """The sharpest first, then those that look elsewhere; copies come last."""
    weights = np.full((4, 5), 0.1)
    weights[0, 0] = weights[0, 3] = 0.9  # two copies
    weights[1, 1], weights[2, 2] = 0.8, 0.7
    assert different_slots(weights, 3) == [0, 1, 2]
    assert sorted(different_slots(weights, 9)) == [0, 1, 2, 3, 4]
    assert different_slots(weights, 5)[-1] == 3


def test_evenly():
    """Spread over all, both ends, each once."""
    assert list(evenly(10, 4)) == [0, 3, 6, 9]
    assert list(evenly(3, 16)) == [0, 1, 2]
    assert list(evenly(1, 4)) == [0]
