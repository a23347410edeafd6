"""The compiled attention against the plain one in float64."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transforms import TRANSFORMS

from softmoe.accelerate import attention as module
from softmoe.accelerate import guards
from softmoe.models.transformer import Attention

needs_compiler = pytest.mark.skipif(not module.KERNEL.available, reason=f"not compiled: {module.KERNEL.why_not()}")
BOTH = ["_forward", "_backward"]


class QKV(NamedTuple):
    """The layers before the product of queries and keys."""

    qkv: nn.Module
    query_norm: nn.Module
    key_norm: nn.Module


def attend(x: Tensor, of: QKV, heads: int, mask: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    """An attention of these layers whose last one is the identity."""
    attention = module.CompiledAttention.__new__(module.CompiledAttention)  # its own layers would be drawn at random
    nn.Module.__init__(attention)
    attention.heads, attention.dropout = heads, dropout
    attention.qkv, attention.query_norm, attention.key_norm = of  # pyright: ignore[reportAttributeAccessIssue]
    attention.out = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
    return attention(x, mask)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The compiled passes that are called from now on; small tensors are worth one too."""
    calls: list[str] = []
    monkeypatch.setattr(guards, "LARGE", 0)
    for name in BOTH:
        plain = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, f=plain, n=name: (calls.append(n), f(*args))[1])
    return calls


def layers(heads: int, width: int, *, qk_norm: bool = True, dim: int = 24) -> QKV:
    qkv = nn.Linear(dim, 3 * heads * width)
    nn.init.normal_(qkv.bias)
    norms = [nn.LayerNorm(width, eps=eps, bias=False) if qk_norm else nn.Identity() for eps in (1e-6, 1e-2)]
    for scale in (p for norm in norms for p in norm.parameters()):
        nn.init.normal_(scale)
    return QKV(qkv, *norms)


def parameters(of: QKV) -> list[nn.Parameter]:
    return [p for layer in of for p in layer.parameters()]


def exactly(of: QKV) -> QKV:
    """The same in float64."""
    width = of.qkv.out_features // 3
    heads = width // of.query_norm.normalized_shape[0] if isinstance(of.query_norm, nn.LayerNorm) else 1
    copy = layers(heads, width // heads, qk_norm=isinstance(of.query_norm, nn.LayerNorm), dim=of.qkv.in_features)
    for one, other in zip(copy, of, strict=True):
        one.load_state_dict(other.state_dict())
    return QKV(*(layer.double() for layer in copy))


def outputs_and_gradients(
    x: Tensor, of: QKV, heads: int, mask: Tensor | None, upstream: Tensor | None = None
) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = attend(x, of, heads, mask)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y) if upstream is None else upstream
    return [y, *torch.autograd.grad(y, (x, *parameters(of)), upstream)]


def check(passes: list[str], x: Tensor, of: QKV, heads: int, mask: Tensor | None = None) -> list[Tensor]:
    found = outputs_and_gradients(x, of, heads, mask)
    assert passes == BOTH
    exact = outputs_and_gradients(x.double(), exactly(of), heads, mask)
    assert passes == BOTH, "float64 is not for the compiled pass"
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-5, atol=2e-5 * max(1.0, other.abs().max().item()))
    return found


@needs_compiler
@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("width", [16, 48, 64, 80, 128, 256])
@pytest.mark.parametrize("tokens", [1, 5, 16, 67, 150])
def test_outputs_and_gradients(passes: list[str], tokens: int, width: int, qk_norm: bool) -> None:
    """Tokens that fill no vector and no tile, and more than are weighed together; every shape of a tile."""
    check(passes, torch.randn(2, tokens, 24) * 2 + 1, layers(3, width, qk_norm=qk_norm), 3)


@needs_compiler
def test_attention_as_a_model_builds_it(passes: list[str]) -> None:
    """Its linear layers, which draw themselves, are plain ones to the compiled pass."""
    layer = Attention(32, 2)
    module.switch_on(layer)
    layer(torch.randn(2, 5, 32)).sum().backward()
    assert passes == BOTH


@needs_compiler
def test_the_number_of_threads_changes_no_bit(passes: list[str]) -> None:
    x, of = torch.randn(3, 20, 24), layers(3, 32)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        given = module._Inputs(F.linear(x, of.qkv.weight), of.qkv.bias, of.query_norm.weight, of.key_norm.weight)
        with torch.no_grad():
            library = module.KERNEL.library
            found = module._forward(library, given, None, 3, (1e-6, 1e-6))
            results.append([*found, *module._backward(library, given, None, (*found, found[0]), (1e-6, 1e-6))])
    for others in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], others, strict=True))


@needs_compiler
def test_mask(passes: list[str]) -> None:
    """What is hidden changes no bit of what is seen, and gets no gradient through keys and values."""
    x, of = torch.randn(2, 37, 24), layers(2, 32)
    mask = torch.ones(2, 37, dtype=torch.bool)
    mask[0, 20:] = False
    mask[1, ::3] = False
    found = check(passes, x, of, 2, mask)
    changed = torch.where(mask.unsqueeze(-1), x, torch.randn(2, 37, 24) * 5)
    again = outputs_and_gradients(changed, of, 2, mask)
    assert torch.equal(found[0][mask], again[0][mask])
    upstream = torch.where(mask.unsqueeze(-1), torch.randn(2, 37, 64), 0.0)
    dx = outputs_and_gradients(x, of, 2, mask, upstream)[1]
    assert dx[mask].any()
    assert not dx[~mask].any()


@needs_compiler
def test_a_sequence_that_sees_nothing(passes: list[str]) -> None:
    """As with torch: zeros, and no gradient."""
    x, of, mask = torch.randn(2, 9, 24), layers(2, 16), torch.tensor([[True] * 9, [False] * 9])
    found = check(passes, x, of, 2, mask)
    assert not found[0][1].any()
    assert not found[1][1].any()


@needs_compiler
def test_large_products_and_what_is_not_finite(passes: list[str]) -> None:
    """One key takes all the weight; a NaN is not hidden."""
    of = layers(2, 16, qk_norm=False)
    x = torch.randn(1, 8, 24) * 10
    check(passes, x, of, 2)
    x[0, 3, 5] = torch.nan
    assert outputs_and_gradients(x, of, 2, None)[0].isnan().all()


@needs_compiler
def test_gradients_laid_out_otherwise(passes: list[str]) -> None:
    x, of = torch.randn(2, 9, 24), layers(2, 16)
    upstream = torch.randn(2, 32, 9).transpose(1, 2)
    found = outputs_and_gradients(x, of, 2, None, upstream)
    again = outputs_and_gradients(x, of, 2, None, upstream.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@needs_compiler
@pytest.mark.parametrize("qk_norm", [True, False])
def test_attention_with_and_without(passes: list[str], monkeypatch: pytest.MonkeyPatch, qk_norm: bool) -> None:
    """The whole module: the same output and the same gradients of everything."""
    attention = Attention(96, 3, qk_norm=qk_norm)
    guards.swap_class(attention, Attention, module.CompiledAttention)
    x, upstream = torch.randn(2, 7, 96, requires_grad=True), torch.randn(2, 7, 96)

    def run() -> list[Tensor]:
        y = attention(x)
        return [y, *torch.autograd.grad(y, (x, *attention.parameters()), upstream)]

    found = run()
    assert passes == BOTH
    monkeypatch.setattr(guards, "LARGE", 1 << 30)
    for one, other in zip(found, run(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert passes == BOTH


@needs_compiler
def test_frozen_parameters(passes: list[str]) -> None:
    of = layers(2, 16)
    of.query_norm.requires_grad_(False)
    of.qkv.bias.requires_grad_(False)
    attend(torch.randn(1, 4, 24, requires_grad=True), of, 2).sum().backward()
    assert passes == BOTH
    assert of.query_norm.weight.grad is None
    assert of.qkv.bias.grad is None
    assert of.key_norm.weight.grad is not None
    assert of.qkv.weight.grad is not None


@needs_compiler
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_see_what_they_can_derive(passes: list[str], transform: Callable[..., Tensor]) -> None:
    x, of = torch.randn(3, 4, 24), layers(2, 16)

    def function(of: QKV) -> Callable[[Tensor], Tensor]:
        return lambda x: attend(x, of, 2).pow(3).sum()

    with sdpa_kernel(SDPBackend.MATH):
        found = transform(function(of), x.clone())
        exact = transform(function(exactly(of)), x.double())
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-4)


@needs_compiler
def test_whoever_listens_is_heard(passes: list[str]) -> None:
    """Hooks on the layers, layers of another kind, autocast, whoever counts operations."""
    x, heard = torch.randn(1, 4, 24, requires_grad=True), []
    for index in range(3):
        of = layers(2, 16)
        of[index].register_forward_hook(lambda *args: heard.append(args[2].shape))
        attend(x, of, 2)
    assert heard == [(1, 4, 96), (1, 4, 2, 16), (1, 4, 2, 16)]
    attend(x, layers(2, 16)._replace(query_norm=nn.LayerNorm(16)), 2)
    attend(x, layers(2, 16)._replace(query_norm=nn.LayerNorm(16, elementwise_affine=False)), 2)
    attend(x, layers(2, 16)._replace(query_norm=nn.LayerNorm((2, 16), bias=False)), 2)
    attend(x, layers(2, 16)._replace(key_norm=nn.RMSNorm(16)), 2)
    attend(x, layers(2, 16)._replace(qkv=nn.Sequential(nn.Linear(24, 96))), 2)
    attend(x, layers(2, 16), 2, dropout=0.5)
    attend(x, layers(2, 24), 2)
    with torch.autocast("cpu", torch.float16):
        assert attend(x, layers(2, 16), 2).dtype == torch.float16
    with FlopCounterMode(display=False):
        attend(x, layers(2, 16), 2)
    assert passes == []


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "LARGE", 0)
    monkeypatch.setattr(module.KERNEL, "_found", "no compiler")
    x, of = torch.randn(2, 5, 24, requires_grad=True), layers(2, 16)
    found = outputs_and_gradients(x, of, 2, None)
    exact = outputs_and_gradients(x.double(), exactly(of), 2, None)
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
