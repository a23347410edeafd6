"""Attention of tokens to each other. In a training step on a CPU it is that of attention.cpp: two thirds of the time.

Letters: B sequences, M tokens, D width, C = 3 D numbers of a query, a key and a value, A heads, E head width.

torch copies queries and keys for their norms, gathers three gradients in two more copies, adds the bias in a pass of
its own and its gradient in another. The compiled pass goes from the one product to what is attended, and back.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from softmoe.compiled import LANES, address, library_of, loaded, threads, worth_it, worth_it_backward
from softmoe.models.dense import product, unheard

WIDEST = 256


class Layers(NamedTuple):
    """Whose parameters an attention has: an nn.Linear or what stands in its place, and norms or nn.Identity."""

    qkv: nn.Module
    query_norm: nn.Module
    key_norm: nn.Module


def attend(x_BMD: Tensor, layers: Layers, heads: int, mask_BM: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    """(B, M, D): the heads side by side."""
    qkv, query_norm, key_norm = layers
    if not dropout and _serves(x_BMD, layers, heads, mask_BM):
        assert isinstance(qkv, nn.Linear)
        given = _Given(product(x_BMD, qkv.weight), qkv.bias, _scale(query_norm), _scale(key_norm))
        real_BM = None if mask_BM is None else mask_BM.contiguous()
        return _Attend.apply(*given, real_BM, heads, (_eps(query_norm), _eps(key_norm)))  # pyright: ignore[reportReturnType]
    query, key, value = _parts(qkv(x_BMD), heads)
    query, key = query_norm(query).to(value.dtype), key_norm(key).to(value.dtype)
    return _mixed((query, key, value), mask_BM, dropout)


def _parts(qkv_BMC: Tensor, heads: int) -> list[Tensor]:
    return [t.unflatten(2, (heads, -1)) for t in qkv_BMC.chunk(3, dim=2)]


def _mixed(parts_BMAE: tuple[Tensor, ...], mask_BM: Tensor | None, dropout: float = 0.0) -> Tensor:
    mixed_BAME = F.scaled_dot_product_attention(
        *(part_BMAE.transpose(1, 2) for part_BMAE in parts_BMAE),
        attn_mask=None if mask_BM is None else mask_BM[:, None, None, :],
        dropout_p=dropout,
    )
    return mixed_BAME.transpose(1, 2).flatten(2)


def _serves(x_BMD: Tensor, layers: Layers, heads: int, mask_BM: Tensor | None) -> bool:
    """Whether the compiled pass may stand for the layers: plain ones that no hook listens to."""
    qkv, *norms = layers
    if not unheard(qkv, nn.Linear) or qkv.bias is None:
        return False
    width = qkv.out_features // (3 * heads)
    return (
        all(_known(norm, width) for norm in norms)
        and width % LANES == 0
        and width <= WIDEST
        and x_BMD.dim() == 3
        and (mask_BM is None or (mask_BM.dtype == torch.bool and mask_BM.shape == x_BMD.shape[:2]))
        and worth_it(x_BMD, *(p for layer in layers for p in layer.parameters()), times=3)
        and isinstance(_library(), ctypes.CDLL)
    )


def _known(norm: nn.Module, width: int) -> bool:
    """None, or that of a head, with a scale and without a bias."""
    if unheard(norm, nn.LayerNorm):
        return norm.bias is None and norm.weight is not None and norm.weight.shape == (width,)
    return unheard(norm, nn.Identity)


def _scale(norm: nn.Module) -> Tensor | None:
    return norm.weight if isinstance(norm, nn.LayerNorm) else None


def _eps(norm: nn.Module) -> float:
    return norm.eps if isinstance(norm, nn.LayerNorm) else 0.0


class _Given(NamedTuple):
    """What gradients are asked of; the product has no bias yet."""

    qkv_BMC: Tensor
    bias_C: Tensor
    query_E: Tensor | None
    key_E: Tensor | None


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        qkv_BMC: Tensor,
        bias_C: Tensor,
        query_E: Tensor | None,
        key_E: Tensor | None,
        mask_BM: Tensor | None,
        heads: int,
        eps: tuple[float, float],
    ) -> Tensor:
        given = _Given(qkv_BMC, bias_C, query_E, key_E)
        out_BMD, logarithms_BAM = _forward(loaded(_library()), given, mask_BM, heads, eps)
        ctx.save_for_backward(*given, mask_BM, out_BMD, logarithms_BAM)
        ctx.heads, ctx.eps = heads, eps
        return out_BMD

    @staticmethod
    def backward(ctx: Any, dout_BMD: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        *given, mask_BM, out_BMD, logarithms_BAM = ctx.saved_tensors
        given = _Given(*given)
        if worth_it_backward(dout_BMD):
            results = (out_BMD, logarithms_BAM, dout_BMD)
            return (*_backward(loaded(_library()), given, mask_BM, results, ctx.eps), None, None, None)
        needed, derived = ctx.needs_input_grad[:4], torch.is_grad_enabled()
        with torch.enable_grad():
            output = _plain(given, mask_BM, ctx.heads, ctx.eps)
            asked = [t for t, need in zip(given, needed, strict=True) if t is not None and need]
            found = iter(torch.autograd.grad(output, asked, dout_BMD, create_graph=derived))
        return (*(next(found) if need else None for need in needed), None, None, None)


def _plain(given: _Given, mask_BM: Tensor | None, heads: int, eps: tuple[float, float]) -> Tensor:
    """The same by torch, such that it can be derived twice."""
    query, key, value = _parts(given.qkv_BMC + given.bias_C, heads)
    if given.query_E is not None:
        query = F.layer_norm(query, given.query_E.shape, given.query_E, None, eps[0])
    if given.key_E is not None:
        key = F.layer_norm(key, given.key_E.shape, given.key_E, None, eps[1])
    with sdpa_kernel(SDPBackend.MATH):
        return _mixed((query, key, value), mask_BM)


def _forward(
    library: ctypes.CDLL, given: _Given, mask_BM: Tensor | None, heads: int, eps: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """What is attended, and the logarithms of the softmax' sums."""
    B, M, C = given.qkv_BMC.shape
    out = given.qkv_BMC.new_empty(B, M, C // 3), given.qkv_BMC.new_empty(B, heads, M)
    library.attend(*_addresses(*given, mask_BM, *out), *_sizes(given.qkv_BMC, heads, eps))
    return out


def _backward(
    library: ctypes.CDLL,
    given: _Given,
    mask_BM: Tensor | None,
    results: tuple[Tensor, Tensor, Tensor],
    eps: tuple[float, float],
) -> tuple[Tensor | None, ...]:
    """`results` are what `_forward` found and the gradient of the first."""
    out_BMD, logarithms_BAM, dout_BMD = results
    small = [None if t is None else torch.zeros_like(t) for t in given[1:]]
    found = (torch.empty_like(given.qkv_BMC), *small)
    inputs = (*given, mask_BM, out_BMD, logarithms_BAM, dout_BMD.contiguous())
    library.attend_backward(*_addresses(*inputs, *found), *_sizes(given.qkv_BMC, logarithms_BAM.shape[1], eps))
    return found


def _addresses(*tensors: Tensor | None) -> list[ctypes.c_void_p | None]:
    return [None if t is None else address(t) for t in tensors]


def _sizes(qkv_BMC: Tensor, heads: int, eps: tuple[float, float]) -> tuple[Any, ...]:
    B, M, C = qkv_BMC.shape
    return (*map(ctypes.c_int64, (B, M, heads, C // (3 * heads))), *map(ctypes.c_float, eps), threads())


@cache
def _library() -> ctypes.CDLL | str:
    return library_of(Path(__file__).with_name("attention.cpp"), _right)


def _right(library: ctypes.CDLL) -> bool:
    """Compared with torch, both ways, with a token that nobody sees."""
    B, M, heads, E, eps = 2, 9, 2, 16, (1e-6, 1e-3)
    numbers = torch.arange(B * M * 3 * heads * E).remainder(13).view(B, M, -1).float()
    scales = [torch.linspace(start, 2, E) for start in (-1, 1)]
    given = _Given(*(t.requires_grad_() for t in (numbers, torch.linspace(-1, 1, 3 * heads * E), *scales)))
    mask = torch.arange(B * M).view(B, M) != 4
    with torch.enable_grad():
        output = _plain(given, mask, heads, eps)
        plain = torch.autograd.grad(output, [t for t in given if t is not None], output)
    with torch.no_grad():
        found = _forward(library, given, mask, heads, eps)
        gradients = _backward(library, given, mask, (*found, output), eps)
    pairs = zip((found[0], *gradients), (output, *plain), strict=True)
    return all(one is not None and (one - other).abs().max() <= 1e-5 * other.abs().max() for one, other in pairs)
