"""Self-attention by attention.cpp, on a CPU: two thirds of the time of torch's.

Letters: B sequences, M tokens, D width, C = 3 D numbers of a query, a key and a value, A heads, E head width.

torch copies queries and keys for their norms, gathers three gradients in two more copies, adds the bias in a pass of
its own and its gradient in another. The compiled code does all of it in one pass, forward and backward.
"""

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from softmoe.accelerate.build import Kernel, call
from softmoe.accelerate.guards import LANES, Off, backward_is_plain, has_no_hooks, kernel_applies, swap_class
from softmoe.models.transformer import Attention, XavierLinear

WIDEST = 256


def switch_on(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
    if why := KERNEL.why_not():
        raise Off(why)
    if not (count := swap_class(model, Attention, CompiledAttention)):
        raise Off("no attention of softmoe in this model")
    return f"{count} layers"


class CompiledAttention(Attention):
    plain_class = Attention

    def forward(self, x_BMD: Tensor, mask: Tensor | None = None) -> Tensor:
        if not kernel_supports(self, x_BMD, mask):
            return super().forward(x_BMD, mask)
        without_bias = getattr(self.qkv, "without_bias", None)
        qkv_BMC = F.linear(x_BMD, self.qkv.weight) if without_bias is None else without_bias(x_BMD)
        inputs = _Inputs(qkv_BMC, self.qkv.bias, _scale(self.query_norm), _scale(self.key_norm))
        seen_BM = None if mask is None else mask.contiguous()
        mixed_BMD, _ = attend(*inputs, seen_BM, self.heads, _eps(self.query_norm), _eps(self.key_norm))
        return self.out(mixed_BMD)


def kernel_supports(layer: Attention, x_BMD: Tensor, mask_BM: Tensor | None) -> bool:
    """True if the compiled code may replace the layers: plain ones without hooks, and a mask of tokens."""
    qkv, norms = layer.qkv, (layer.query_norm, layer.key_norm)
    plain = has_no_hooks(qkv, XavierLinear) or has_no_hooks(qkv, nn.Linear)
    if (layer.dropout and layer.training) or not plain or qkv.bias is None:
        return False
    width = qkv.out_features // (3 * layer.heads)
    return (
        all(_norm_supported(norm, width) for norm in norms)
        and width % LANES == 0
        and width <= WIDEST
        and x_BMD.dim() == 3
        and (mask_BM is None or (mask_BM.dtype == torch.bool and mask_BM.shape == x_BMD.shape[:2]))
        and kernel_applies(x_BMD, *(p for part in (qkv, *norms) for p in part.parameters()), times=3)
        and KERNEL.available
    )


def _norm_supported(norm: nn.Module, width: int) -> bool:
    """True for no norm, and for a LayerNorm of one head with a scale and without a bias."""
    if has_no_hooks(norm, nn.LayerNorm):
        return norm.bias is None and norm.weight is not None and norm.weight.shape == (width,)
    return has_no_hooks(norm, nn.Identity)


def _scale(norm: nn.Module) -> Tensor | None:
    return norm.weight if isinstance(norm, nn.LayerNorm) else None


def _eps(norm: nn.Module) -> float:
    return norm.eps if isinstance(norm, nn.LayerNorm) else 0.0


class _Inputs(NamedTuple):
    """The tensors that get gradients; the product has no bias yet."""

    qkv_BMC: Tensor
    bias_C: Tensor
    query_E: Tensor | None
    key_E: Tensor | None


@torch.library.custom_op("softmoe::attend", mutates_args=(), device_types="cpu")
def attend(
    qkv_BMC: Tensor,
    bias_C: Tensor,
    query_E: Tensor | None,
    key_E: Tensor | None,
    mask_BM: Tensor | None,
    heads: int,
    query_eps: float,
    key_eps: float,
) -> tuple[Tensor, Tensor]:
    """Return the attended values (B, M, D), heads side by side, and the log-sum-exp of the logits (B, A, M)."""
    return _forward(KERNEL.library, _Inputs(qkv_BMC, bias_C, query_E, key_E), mask_BM, heads, (query_eps, key_eps))


@attend.register_fake
def _(
    qkv_BMC: Tensor,
    bias_C: Tensor,
    query_E: Tensor | None,
    key_E: Tensor | None,
    mask_BM: Tensor | None,
    heads: int,
    query_eps: float,
    key_eps: float,
) -> tuple[Tensor, Tensor]:
    return _outputs(qkv_BMC, heads)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.heads, query_eps, key_eps = inputs
    ctx.eps = (query_eps, key_eps)
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, dout_BMD: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, mask_BM, out_BMD, logarithms_BAM = ctx.saved_tensors
    inputs = _Inputs(*tensors)
    if not backward_is_plain(dout_BMD):
        results = (out_BMD, logarithms_BAM, dout_BMD)
        return (*_backward(KERNEL.library, inputs, mask_BM, results, ctx.eps), None, None, None, None)
    needed, twice = ctx.needs_input_grad[:4], torch.is_grad_enabled()
    with torch.enable_grad():
        output = _plain(inputs, mask_BM, ctx.heads, ctx.eps)
        asked = [t for t, need in zip(inputs, needed, strict=True) if t is not None and need]
        found = iter(torch.autograd.grad(output, asked, dout_BMD, create_graph=twice))
    return (*(next(found) if need else None for need in needed), None, None, None, None)


attend.register_autograd(_gradients, setup_context=_save)


def _plain(inputs: _Inputs, mask_BM: Tensor | None, heads: int, eps: tuple[float, float]) -> Tensor:
    """Compute the attention with torch alone, so that it can be differentiated twice."""
    parts = (inputs.qkv_BMC + inputs.bias_C).chunk(3, dim=2)
    query, key, value = (part.unflatten(2, (heads, -1)) for part in parts)
    if inputs.query_E is not None:
        query = F.layer_norm(query, inputs.query_E.shape, inputs.query_E, None, eps[0])
    if inputs.key_E is not None:
        key = F.layer_norm(key, inputs.key_E.shape, inputs.key_E, None, eps[1])
    mask = None if mask_BM is None else mask_BM[:, None, None, :]
    with sdpa_kernel(SDPBackend.MATH):
        mixed_BAME = F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask
        )
    return mixed_BAME.transpose(1, 2).flatten(2)


def _outputs(qkv_BMC: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    B, M, C = qkv_BMC.shape
    return qkv_BMC.new_empty(B, M, C // 3), qkv_BMC.new_empty(B, heads, M)


def _forward(
    library: ctypes.CDLL, inputs: _Inputs, mask_BM: Tensor | None, heads: int, eps: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    out = _outputs(inputs.qkv_BMC, heads)
    call(library.attend, *inputs, mask_BM, *out, *_sizes(inputs.qkv_BMC, heads, eps))
    return out


def _backward(
    library: ctypes.CDLL,
    inputs: _Inputs,
    mask_BM: Tensor | None,
    results: tuple[Tensor, Tensor, Tensor],
    eps: tuple[float, float],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of all inputs. `results` are both outputs of `_forward` and the gradient of the first."""
    out_BMD, logarithms_BAM, dout_BMD = results
    small = [None if t is None else torch.zeros_like(t) for t in inputs[1:]]
    found = (torch.empty_like(inputs.qkv_BMC), *small)
    given = (*inputs, mask_BM, out_BMD, logarithms_BAM, dout_BMD.contiguous())
    call(library.attend_backward, *given, *found, *_sizes(inputs.qkv_BMC, logarithms_BAM.shape[1], eps))
    return found


def _sizes(qkv_BMC: Tensor, heads: int, eps: tuple[float, float]) -> tuple[int | float, ...]:
    B, M, C = qkv_BMC.shape
    return (B, M, heads, C // (3 * heads), *map(float, eps))


def self_test(library: ctypes.CDLL) -> bool:
    """Compare outputs and gradients with torch's, with one masked token."""
    B, M, heads, E, eps = 2, 9, 2, 16, (1e-6, 1e-3)
    numbers = torch.arange(B * M * 3 * heads * E).remainder(13).view(B, M, -1).float()
    scales = [torch.linspace(start, 2, E) for start in (-1, 1)]
    inputs = _Inputs(*(t.requires_grad_() for t in (numbers, torch.linspace(-1, 1, 3 * heads * E), *scales)))
    mask = torch.arange(B * M).view(B, M) != 4
    with torch.enable_grad():
        output = _plain(inputs, mask, heads, eps)
        plain = torch.autograd.grad(output, [t for t in inputs if t is not None], output)
    with torch.no_grad():
        found = _forward(library, inputs, mask, heads, eps)
        gradients = _backward(library, inputs, mask, (*found, output), eps)
    pairs = zip((found[0], *gradients), (output, *plain), strict=True)
    return all(one is not None and (one - other).abs().max() <= 1e-5 * other.abs().max() for one, other in pairs)


KERNEL = Kernel("attention", self_test)
