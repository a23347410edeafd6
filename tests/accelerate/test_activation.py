"""The compiled activation against torch's in float64, and who is not given it."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from transforms import TRANSFORMS

from softmoe.accelerate import activation as module
from softmoe.accelerate import guards
from softmoe.accelerate.activation import CompiledGELU

needs_compiler = pytest.mark.skipif(not module.KERNEL.available, reason=f"not compiled: {module.KERNEL.why_not()}")


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The compiled passes that are called from now on; small tensors are worth one too."""
    calls: list[str] = []
    plain = module._pointwise
    monkeypatch.setattr(guards, "LARGE", 0)
    monkeypatch.setattr(
        module, "_pointwise", lambda function, *inputs: (calls.append(function.__name__), plain(function, *inputs))[1]
    )
    return calls


def gelu(x: Tensor, activation: str) -> Tensor:
    return CompiledGELU(approximate="tanh" if activation == "gelu_tanh" else "none")(x)


def both(x: Tensor, upstream: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = gelu(x, "gelu_tanh")
    return [y.detach(), *torch.autograd.grad(y, x, upstream)]


@needs_compiler
@given(shape=st.lists(st.integers(1, 40), min_size=1, max_size=3), width=st.floats(0.1, 20), threads=st.integers(1, 3))
def test_output_and_gradient(shape: list[int], width: float, threads: int) -> None:
    """Any size, so any rest of a vector; any number of threads."""
    x, upstream = torch.randn(shape) * width, torch.randn(shape)
    exact = both(x.double(), upstream.double())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guards, "LARGE", 0)
        torch.set_num_threads(threads)
        found = both(x, upstream)
        torch.set_num_threads(1)
    torch.testing.assert_close(found[0].double(), exact[0], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found[1].double(), exact[1], rtol=1e-5, atol=2e-6)


@needs_compiler
def test_far_values(passes: list[str]) -> None:
    """Far out it is 0 or x, with a gradient of 0 or 1, and what is no number stays none."""
    x = torch.tensor([-1e30, -1e4, -100.0, 0.0, 100.0, 1e4, 1e18, float("nan")])
    y, gradient = both(x, torch.ones(8))
    assert passes == ["gelu", "gelu_backward"]
    assert y[:3].abs().max() < 1e-6
    assert torch.equal(y[3:7], x[3:7])
    torch.testing.assert_close(gradient[1:6], torch.tensor([0.0, 0.0, 0.5, 1.0, 1.0]))
    assert y[7].isnan()
    assert gradient[7].isnan()


@needs_compiler
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_see_what_they_can_derive(passes: list[str], transform: Callable[..., Tensor]) -> None:
    """Second derivatives, transforms and forward mode are those of torch."""

    def function(x: Tensor) -> Tensor:
        return gelu(x, "gelu_tanh").square().sum()

    x = torch.randn(3, 5)
    exact = transform(function, x.double()).float()
    torch.testing.assert_close(transform(function, x.clone()), exact, rtol=1e-5, atol=1e-6)


@needs_compiler
def test_only_for_large_tensors(passes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, not in one piece, in the exact form, or too small: torch's own. Else the compiled one, also without
    gradients."""
    x = torch.randn(4, 6, requires_grad=True)
    gelu(x.double(), "gelu_tanh")
    gelu(x.t(), "gelu_tanh")
    torch.testing.assert_close(gelu(x, "gelu"), F.gelu(x))
    monkeypatch.setattr(guards, "LARGE", x.nbytes)
    gelu(x, "gelu_tanh")
    assert passes == []
    monkeypatch.setattr(guards, "LARGE", x.nbytes - 1)
    gelu(x, "gelu_tanh").sum().backward()  # a gradient that is one number, spread out
    with torch.no_grad():
        torch.testing.assert_close(gelu(x, "gelu_tanh"), F.gelu(x, approximate="tanh"))
    assert passes == ["gelu", "gelu_backward", "gelu"]


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "LARGE", 0)
    monkeypatch.setattr(module.KERNEL, "_found", "no compiler")
    x = torch.randn(4, 6, requires_grad=True)
    assert torch.equal(gelu(x, "gelu_tanh"), F.gelu(x, approximate="tanh"))
