"""Queries, keys and values by the compiled pass, against the plain ones in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from softmoe import compiled
from softmoe.models import qkv as module
from softmoe.models.qkv import WIDTHS, split_heads
from softmoe.models.transformer import Attention

needs_compiler = pytest.mark.skipif(isinstance(module._library(), str), reason=f"not compiled: {module._library()}")


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The compiled passes that are called from now on; small tensors are worth one too."""
    calls: list[str] = []
    monkeypatch.setattr(compiled, "LARGE", 0)
    for name in ("_forward", "_backward"):
        plain = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, f=plain, n=name: (calls.append(n), f(*args))[1])
    return calls


def norms(width: int) -> list[nn.LayerNorm]:
    found = [nn.LayerNorm(width, eps=eps, bias=False) for eps in (1e-6, 1e-2)]
    for norm in found:
        nn.init.normal_(norm.weight)
    return found


def outputs_and_gradients(qkv: Tensor, heads: int, both: list[nn.LayerNorm], upstream: list[Tensor]) -> list[Tensor]:
    qkv = qkv.clone().requires_grad_()
    parts = split_heads(qkv, heads, *both)
    return [*parts, *torch.autograd.grad(parts, (qkv, *(norm.weight for norm in both)), upstream)]


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("width", WIDTHS)
def test_outputs_and_gradients(passes: list[str], width: int, threads: int) -> None:
    """Every width of a head; rows that the threads share unevenly; norms that differ; gradients laid out otherwise."""
    torch.set_num_threads(threads)
    qkv, both = torch.randn(2, 5, 9 * width) * 3 + 1, norms(width)
    upstream = [torch.randn(2, 3, 5, width).transpose(1, 2) for _ in range(3)]
    found = outputs_and_gradients(qkv, 3, both, upstream)
    assert passes == ["_forward", "_backward"]
    exact = outputs_and_gradients(qkv.double(), 3, [n.double() for n in both], [u.double() for u in upstream])
    assert len(passes) == 2
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


@needs_compiler
def test_attention_with_and_without(passes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole module: the same output and the same gradients of everything."""
    attention = Attention(96, 3)
    x, upstream = torch.randn(2, 7, 96, requires_grad=True), torch.randn(2, 7, 96)

    def run() -> list[Tensor]:
        y = attention(x)
        return [y, *torch.autograd.grad(y, (x, *attention.parameters()), upstream)]

    found = run()
    assert passes == ["_forward", "_backward"]
    monkeypatch.setattr(compiled, "LARGE", 1 << 30)
    for one, other in zip(found, run(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert len(passes) == 2


@needs_compiler
def test_frozen_scales_and_unused_parts(passes: list[str]) -> None:
    """A frozen norm gets no gradient; a part that nobody uses counts as zeros."""
    qkv, both = torch.randn(1, 4, 96, requires_grad=True), norms(16)
    both[0].requires_grad_(False)
    split_heads(qkv, 2, *both)[1].sum().backward()
    assert both[0].weight.grad is None
    assert both[1].weight.grad is not None
    assert qkv.grad is not None
    assert not qkv.grad[..., :32].any()
    assert not qkv.grad[..., 64:].any()


def derived_twice(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.requires_grad_()
    (first,) = torch.autograd.grad(function(x), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), x)[0]


def per_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(lambda row: function(row[None])))(x)


def batched_backward(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.requires_grad_()
    return torch.autograd.grad(function(x), x, torch.tensor([1.0, 2.0]).to(x), is_grads_batched=True)[0]


@needs_compiler
@pytest.mark.parametrize("transform", [derived_twice, per_row, batched_backward])
def test_transforms_see_what_they_can_derive(passes: list[str], transform: Callable[..., Tensor]) -> None:
    both, exact = norms(16), norms(16)
    for one, other in zip(exact, both, strict=True):
        one.load_state_dict(other.state_dict())
        one.double()
    x = torch.randn(3, 4, 96)

    def of(norms: list[nn.LayerNorm]) -> Callable[[Tensor], Tensor]:
        return lambda x: sum(part.pow(3).sum() for part in split_heads(x, 2, *norms))  # pyright: ignore[reportReturnType]

    found = transform(of(both), x.clone())
    torch.testing.assert_close(found.double(), transform(of(exact), x.double()), rtol=1e-4, atol=1e-4)


@needs_compiler
def test_hooks_are_heard(passes: list[str]) -> None:
    """Whoever listens to a norm hears it, and a norm of another kind is called."""
    qkv, both, heard = torch.randn(1, 4, 96, requires_grad=True), norms(16), []
    both[1].register_forward_hook(lambda *args: heard.append(args[2].shape))
    split_heads(qkv, 2, *both)
    assert heard == [(1, 4, 2, 16)]
    split_heads(qkv, 2, nn.Identity(), nn.Identity())
    split_heads(qkv, 2, nn.LayerNorm(16), both[0])
    assert passes == []


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "LARGE", 0)
    monkeypatch.setattr(module, "_library", lambda: "no compiler")
    qkv, both = torch.randn(1, 4, 96, requires_grad=True), norms(16)
    query, _, value = split_heads(qkv, 2, *both)
    torch.testing.assert_close(query, both[0](qkv[..., :32].unflatten(2, (2, 16))))
    assert torch.equal(value, qkv[..., 64:].unflatten(2, (2, 16)))
