"""The balancing losses: the reference's own numbers, and the plain loops."""

import math

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from softmoe.moe.sparse import gshard_loss, importance_loss, load_loss

GATES = [[0.5, 0.4, 0.1], [0.3, 0.3, 0.4], [0.1, 0.2, 0.7], [0.8, 0.2, 0.0]]
LOGITS = [[0.9, 0.06, 0.04], [0.7, 0.18, 0.12], [0.85, 0.05, 0.1]]
NOISE = [[-0.037, 0.026, -0.018], [-0.074, 0.045, -0.015], [-0.067, -0.059, 0.073]]


def tensor(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)[None]


def everyone(tokens: int) -> torch.Tensor:
    return torch.ones(1, tokens, dtype=torch.bool)


def test_golden_values():
    """gshard 1.0875, importance 0.03875, load 0.4857386: ours and the oracle's."""
    gates, logits, noise = tensor(GATES), tensor(LOGITS), tensor(NOISE)
    assert importance_loss(gates, everyone(4)).item() == pytest.approx(0.03875, abs=1e-12)
    assert oracle.importance_loss(np.array(GATES)) == pytest.approx(0.03875, abs=1e-12)
    assert gshard_loss(gates, gates.argmax(-1), everyone(4)).item() == pytest.approx(1.0875, abs=1e-12)
    assert oracle.gshard_loss(np.array(GATES)) == pytest.approx(1.0875, abs=1e-12)
    assert load_loss(logits, logits + noise, 0.1, 2, everyone(3)).item() == pytest.approx(0.4857386, abs=5e-7)
    plain = oracle.load_loss(np.array(LOGITS), np.array(LOGITS) + np.array(NOISE), 0.1, 2)
    assert plain == pytest.approx(0.4857386, abs=5e-7)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 3), st.integers(0, 2**31))
def test_masked_tokens_do_not_count(tokens, experts, padding, seed):
    """The losses of a padded group are those of its real tokens."""
    torch.manual_seed(seed)
    logits = torch.randn(1, tokens + padding, experts, dtype=torch.float64)
    noisy = logits + 0.1 * torch.randn_like(logits)
    gates = logits.softmax(-1)
    mask = torch.arange(tokens + padding)[None] < tokens
    real = gates[0, :tokens].numpy()
    assert importance_loss(gates, mask).item() == pytest.approx(oracle.importance_loss(real), abs=1e-12)
    assert gshard_loss(gates, gates.argmax(-1), mask).item() == pytest.approx(oracle.gshard_loss(real), abs=1e-12)
    plain = oracle.load_loss(logits[0, :tokens].numpy(), noisy[0, :tokens].numpy(), 0.1, 1)
    assert load_loss(logits, noisy, 0.1, 1, mask).item() == pytest.approx(plain, rel=1e-9, abs=1e-12)


def test_balance_is_the_minimum():
    """Equal use of all experts costs 0 (importance) or 1 (gshard); one expert for all costs the most."""
    balanced = torch.eye(4, dtype=torch.float64)[None]
    collapsed = torch.zeros(1, 4, 4, dtype=torch.float64)
    collapsed[..., 0] = 1.0
    assert importance_loss(balanced, everyone(4)).item() == 0
    assert importance_loss(collapsed, everyone(4)).item() == pytest.approx(3.0)
    assert gshard_loss(balanced, balanced.argmax(-1), everyone(4)).item() == pytest.approx(1.0)
    assert gshard_loss(collapsed, collapsed.argmax(-1), everyone(4)).item() == pytest.approx(4.0)


def test_a_group_without_tokens_costs_nothing_and_has_finite_gradients():
    """Padding must never bring a NaN into the loss."""
    logits = torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True)
    nobody = torch.zeros(1, 3, dtype=torch.bool)
    gates = logits.softmax(-1)
    total = (
        importance_loss(gates, nobody)
        + load_loss(logits, logits + 0.1, 0.1, 2, nobody)
        + gshard_loss(gates, gates.argmax(-1), nobody)
    )
    assert total.item() == 0
    total.sum().backward()
    assert logits.grad is not None
    assert logits.grad.abs().max() == 0


def test_load_uses_the_far_tail_without_loss_of_precision():
    """Chances near 1 and near 0 keep their digits in float64: erfc, not 1 - erf."""
    logits = tensor([[0.0, -1.0]])
    loss = load_loss(logits, logits, 0.1, 1, everyone(1)).item()
    chance = np.array([0.5, 0.5 * math.erfc(10.0 / math.sqrt(2.0))])
    assert loss == pytest.approx(chance.var() / chance.mean() ** 2, rel=1e-12)
