"""The experts' products against the plain expression."""

from concurrent.futures import Future
from functools import partial
from threading import Timer

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from softmoe.moe.product import GradientPool, batched_linear


def tensors(seed: int, N: int, S: int, I: int, O: int, transposed: bool) -> list[Tensor]:  # noqa: E741
    torch.manual_seed(seed)
    shapes = ((N, S, I), (N, O, I) if transposed else (N, I, O), (N, O))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def plain(x: Tensor, w: Tensor, b: Tensor, transposed: bool) -> Tensor:
    return x @ (w.transpose(1, 2) if transposed else w) + b.unsqueeze(1)


@given(*[st.integers(1, high) for high in (4, 5, 6, 7)], st.booleans(), st.booleans(), st.integers(0, 2**31))
def test_output_and_gradients_are_autograds(N, S, I, O, transposed, pooled, seed):  # noqa: E741
    """For weights either way, with or without reused memory; the weight's gradient lies as the weight does."""
    inputs = tensors(seed, N, S, I, O, transposed)
    pool = GradientPool() if pooled else None
    if pool is not None:
        pool.give(torch.full_like(inputs[1], float("nan")))
    y = batched_linear(*inputs, transposed=transposed, pool=pool)
    expected = plain(*inputs, transposed)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn_like(y)
    gradients = torch.autograd.grad(y, inputs, upstream)
    for one, other in zip(gradients, torch.autograd.grad(expected, inputs, upstream), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert gradients[1].is_contiguous()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("transposed", [False, True])
def test_derived_twice_and_forward(transposed):
    """The backward pass is itself differentiable, also where a pool is there, and forward mode agrees."""
    inputs = tensors(0, 2, 3, 4, 5, transposed)
    pool = GradientPool()
    function = partial(batched_linear, transposed=transposed, pool=pool)
    assert torch.autograd.gradgradcheck(function, inputs)
    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True)


def test_only_asked_gradients_are_made():
    """A frozen weight, bias or input gets none."""
    x, w, b = tensors(0, 2, 3, 4, 5, False)
    batched_linear(x.detach(), w, b.detach()).sum().backward()
    assert w.grad is not None
    assert x.grad is None
    assert b.grad is None


def test_the_pool_hands_out_what_came_back():
    """The very memory of a gradient that was given back, for the same shape and type only."""
    pool = GradientPool()
    gradient = torch.zeros(2, 3)
    pool.give(gradient)
    assert pool.take(torch.Size((3, 2)), gradient) is not gradient
    assert pool.take(gradient.shape, gradient.double()) is not gradient
    assert pool.take(gradient.shape, gradient) is gradient
    assert pool.take(gradient.shape, gradient) is not gradient


def test_memory_that_is_still_used_is_waited_for() -> None:
    """A second gradient is made beside the first; the third takes the place of the first when that is done."""
    pool, like, shape = GradientPool(), torch.empty(0), torch.Size((2, 3))
    first, second = pool.take(shape, like), pool.take(shape, like)
    done: list[Future[None]] = [Future(), Future()]
    pool.give(first, done[0])
    pool.give(second, done[1])
    timer = Timer(0.2, lambda: done[0].set_result(None))
    timer.start()
    third = pool.take(shape, like)
    assert done[0].done(), "it did not wait"
    assert third is first
    assert pool.take(shape, like) is not second
    done[1].set_exception(MemoryError())  # whoever started it hears of it; the memory is free
    assert pool.take(shape, like) is second
