"""Stacked experts against one MLP at a time."""

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from softmoe.moe import Experts


@given(*[st.integers(1, high) for high in (4, 5, 6, 7)], st.integers(0, 2**31))
def test_each_expert_is_its_own_mlp(N, S, D, H, seed):
    """Row by row: linear, tanh-GELU, linear, with that expert's weights and biases."""
    torch.manual_seed(seed)
    experts = Experts(D, H, N).double()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(N, S, D, dtype=torch.float64)
    plain = oracle.ExpertWeights.of(experts)
    expected = np.array([[plain(n, x[n, s].numpy()) for s in range(S)] for n in range(N)])
    np.testing.assert_allclose(experts(x).detach().numpy(), expected, rtol=1e-10, atol=1e-10)


def test_gelu_is_the_tanh_approximation():
    """The oracle's formula is not the exact GELU: the two differ in the fourth digit."""
    x = torch.tensor(2.0, dtype=torch.float64)
    exact = torch.nn.functional.gelu(x).item()
    approximate = torch.nn.functional.gelu(x, approximate="tanh").item()
    assert oracle.gelu_tanh(2.0) == pytest.approx(approximate, abs=1e-15)
    assert abs(oracle.gelu_tanh(2.0) - exact) > 1e-5


@pytest.mark.parametrize("identical", [False, True])
def test_identical_and_independent_start(identical):
    """identical_init copies one draw (weights and biases) to all experts; without it all differ."""
    experts = Experts(8, 16, 4, identical_init=identical)
    for parameter in experts.parameters():
        for n in range(1, 4):
            assert torch.equal(parameter[0], parameter[n]) == identical
    with torch.no_grad():  # and they are copies, not views
        experts.w1[0] += 1.0
    assert not torch.equal(experts.w1[0], experts.w1[1])


def test_dropout_acts_in_training_only_and_keeps_the_mean():
    """Dropout after the activation and after the second linear, off in evaluation."""
    experts = Experts(16, 32, 4, dropout=0.5)
    x = torch.randn(4, 64, 16)
    quiet = experts.eval()(x)
    assert torch.equal(quiet, experts(x))
    noisy = experts.train()(x)
    assert 0.4 < (noisy == 0).double().mean() < 0.6
    many = torch.stack([experts(x) for _ in range(200)]).mean(0)
    assert (many - quiet).abs().mean() < 0.15 * quiet.abs().mean() + 0.05


@pytest.mark.parametrize("seed", [0, 1])
def test_the_start_is_reproducible(seed):
    """The same seed gives the same weights; reset_parameters draws anew."""
    torch.manual_seed(seed)
    first = Experts(4, 8, 2)
    torch.manual_seed(seed)
    second = Experts(4, 8, 2)
    assert torch.equal(first.w1, second.w1)
    second.reset_parameters()
    assert not torch.equal(first.w1, second.w1)


def test_exact_gelu_is_an_option():
    """activation="gelu" is the error function's GELU, expert by expert; another name is refused."""
    experts = Experts(4, 6, 2, activation="gelu").double()
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    expected = [
        torch.nn.functional.gelu(x[n] @ experts.w1[n] + experts.b1[n]) @ experts.w2[n].T + experts.b2[n]
        for n in range(2)
    ]
    torch.testing.assert_close(experts(x), torch.stack(expected))
    with pytest.raises(ValueError, match="activation must be one of gelu_tanh, gelu, quick_gelu, got 'relu'"):
        Experts(4, 6, 2, activation="relu")


def test_experts_follow_autocast():
    """Under autocast both products are in bfloat16 and gradients in the weights' float32."""
    experts = Experts(8, 16, 2)
    with torch.autocast("cpu", torch.bfloat16):
        y = experts(torch.randn(2, 3, 8))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in experts.parameters())


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own
def test_gradients_of_every_kind():
    """Backward, backward of backward and forward mode agree with differences; gradients lie as the weights do."""
    experts = Experts(3, 4, 2).double()
    names = [name for name, _ in experts.named_parameters()]
    inputs = [torch.randn(2, 2, 3, dtype=torch.float64, requires_grad=True), *experts.parameters()]

    def function(x, *parameters):
        return torch.func.functional_call(experts, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, inputs)
    gradients = torch.autograd.grad(experts(inputs[0]).sum(), inputs)
    assert all(gradient.is_contiguous() for gradient in gradients[1:])


def test_autocast_and_half_weights():
    """Under autocast all products are in its type, within its rounding; a model in float64 stays there."""
    experts = Experts(16, 32, 4)
    x = torch.randn(4, 3, 16)
    with torch.autocast("cpu", torch.float16):
        y = experts(x)
    assert y.dtype == torch.float16
    torch.testing.assert_close(y.float(), experts(x), rtol=1e-2, atol=1e-2)
    assert experts.double()(x.double()).dtype == torch.float64
