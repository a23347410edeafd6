"""From one product to normalized queries, normalized keys, and values.

Letters: B sequences, M tokens, C = 3 D numbers of a query, a key and a value, A heads, E head width.

torch copies queries and keys for their norms, and gathers their gradients and those of the values in two more copies.
In a training step on a CPU qkv.cpp does it in one pass each way.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from softmoe.compiled import address, library_of, loaded, threads, worth_it, worth_it_backward

WIDTHS = range(16, 129, 16)


def split_heads(qkv_BMC: Tensor, heads: int, query_norm: nn.Module, key_norm: nn.Module) -> tuple[Tensor, ...]:
    """Each (B, M, A, E)."""
    if _unheard(query_norm) and _unheard(key_norm) and qkv_BMC.shape[2] // (3 * heads) in WIDTHS:
        given = _Given(qkv_BMC, query_norm.weight, key_norm.weight)
        if worth_it(*given) and isinstance(_library(), ctypes.CDLL):
            return _Split.apply(*given, heads, (query_norm.eps, key_norm.eps))  # pyright: ignore[reportReturnType]
    query, key, value = _views(qkv_BMC, heads)
    return query_norm(query).to(value.dtype), key_norm(key).to(value.dtype), value


def _views(qkv_BMC: Tensor, heads: int) -> list[Tensor]:
    return [t.unflatten(2, (heads, -1)) for t in qkv_BMC.chunk(3, dim=2)]


def _unheard(norm: nn.Module) -> TypeGuard[nn.LayerNorm]:
    """A plain norm without bias that no hook listens to: nobody will miss its call."""
    return type(norm) is nn.LayerNorm and norm.bias is None and not norm._forward_hooks and not norm._forward_pre_hooks


class _Given(NamedTuple):
    """What gradients are asked of."""

    qkv_BMC: Tensor
    query_E: Tensor
    key_E: Tensor


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, qkv_BMC: Tensor, query_E: Tensor, key_E: Tensor, heads: int, eps: tuple[float, float]
    ) -> tuple[Tensor, ...]:
        given = _Given(qkv_BMC, query_E, key_E)
        ctx.save_for_backward(*given)
        ctx.heads, ctx.eps = heads, eps
        return (*_forward(loaded(_library()), given, heads, eps), _views(qkv_BMC, heads)[2])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        given = _Given(*ctx.saved_tensors)
        if worth_it_backward(*gradients):
            return (*_backward(loaded(_library()), given, gradients, ctx.eps), None, None)
        needed, derived = ctx.needs_input_grad[:3], torch.is_grad_enabled()
        with torch.enable_grad():
            outputs = _plain(given, ctx.heads, ctx.eps)
            asked = [t for t, need in zip(given, needed, strict=True) if need]
            found = iter(torch.autograd.grad(outputs, asked, gradients, create_graph=derived))
        return (*(next(found) if need else None for need in needed), None, None)


def _plain(given: _Given, heads: int, eps: tuple[float, float]) -> tuple[Tensor, ...]:
    query, key, value = _views(given.qkv_BMC, heads)
    shape = given.query_E.shape
    query = F.layer_norm(query, shape, given.query_E, None, eps[0])
    return query, F.layer_norm(key, shape, given.key_E, None, eps[1]), value


def _forward(library: ctypes.CDLL, given: _Given, heads: int, eps: tuple[float, float]) -> list[Tensor]:
    B, M, C = given.qkv_BMC.shape
    out = [given.qkv_BMC.new_empty(B, M, heads, C // (3 * heads)) for _ in eps]
    library.split_heads(*map(address, (*given, *out)), *_sizes(out[0], eps))
    return out


def _backward(
    library: ctypes.CDLL, given: _Given, gradients: tuple[Tensor, ...], eps: tuple[float, float]
) -> tuple[Tensor, ...]:
    gradients = tuple(g.contiguous() for g in gradients)
    out = (torch.empty_like(given.qkv_BMC), torch.zeros_like(given.query_E), torch.zeros_like(given.key_E))
    library.split_heads_backward(*map(address, (*given, *gradients, *out)), *_sizes(gradients[0], eps))
    return out


def _sizes(like_BMAE: Tensor, eps: tuple[float, float]) -> tuple[Any, ...]:
    B, M, A, E = like_BMAE.shape
    return (*map(ctypes.c_int64, (B * M, A, E)), *map(ctypes.c_float, eps), threads())


@cache
def _library() -> ctypes.CDLL | str:
    return library_of(Path(__file__).with_name("qkv.cpp"), _right)


def _right(library: ctypes.CDLL) -> bool:
    """Compared with torch, both ways."""
    qkv_BMC = torch.arange(6 * 96).remainder(13).view(1, 6, 96).float()
    scales = (torch.linspace(-1, 2, 16), torch.linspace(1, 2, 16))
    given, eps = _Given(*(t.requires_grad_() for t in (qkv_BMC, *scales))), (1e-6, 1e-3)
    with torch.enable_grad():
        outputs = _plain(given, 2, eps)
        plain = torch.autograd.grad(outputs, given, outputs)
    with torch.no_grad():
        found = (*_forward(library, given, 2, eps), *_backward(library, given, outputs, eps))
    pairs = zip(found, (*outputs[:2], *plain), strict=True)
    return all(torch.allclose(one, other, rtol=1e-5, atol=1e-5) for one, other in pairs)
