"""Triton kernel of the experts' batched products, with bias, GELU (tanh) and its gradient applied before storing.

Letters: N experts, S rows per expert, K inputs, J outputs.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from softmoe.accelerate.kernels.dot import depth, dot, launch, precision

ROOT_2_OVER_PI = tl.constexpr(0.7978845608028654)
CUBIC = tl.constexpr(0.044715)


@triton.jit
def tanh_of_gelu(x):
    """Return tanh u of u = sqrt(2/pi) (x + 0.044715 x^3), as 1 - 2 / (e^2u + 1): right where e^2u is 0 or infinite."""
    u = ROOT_2_OVER_PI * (x + CUBIC * x * x * x)
    return 1.0 - 2.0 / (tl.exp(2.0 * u) + 1.0)


@triton.jit
def product_kernel(
    a_ptr, b_ptr, bias_ptr, before_ptr, out_ptr, active_ptr, S, J, K,
    a_stride_n, a_stride_s, a_stride_k, b_stride_n, b_stride_k, b_stride_j,
    EPILOGUE: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute p = a[n] b[n], then what EPILOGUE says; `out`, `before` and `active` are (N, S, J), the bias is (N, J).

    "bias"      out = p + bias
    "gelu"      out = gelu(p + bias); if KEEP also before = p + bias
    "backward"  out = p gelu'(before), active = gelu(before)
    """
    n = tl.program_id(2).to(tl.int64)
    s = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    j = tl.program_id(1) * BLOCK_J + tl.arange(0, BLOCK_J)
    has_s, has_j = s < S, j < J
    product = tl.zeros((BLOCK_S, BLOCK_J), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a_place = n * a_stride_n + s[:, None] * a_stride_s + k[None, :] * a_stride_k
        b_place = n * b_stride_n + k[:, None] * b_stride_k + j[None, :] * b_stride_j
        a = tl.load(a_ptr + a_place, has_s[:, None] & (k < K)[None, :], 0.0)
        b = tl.load(b_ptr + b_place, (k < K)[:, None] & has_j[None, :], 0.0)
        product = dot(a, b, product, PRECISION)
    place = (n * S + s)[:, None] * J + j[None, :]
    real = has_s[:, None] & has_j[None, :]
    if EPILOGUE == "backward":
        before = tl.load(before_ptr + place, real, 0.0).to(tl.float32)
        tanh = tanh_of_gelu(before)
        slope = ROOT_2_OVER_PI * (1.0 + 3.0 * CUBIC * before * before)
        derivative = 0.5 * (1.0 + tanh) + 0.5 * before * (1.0 - tanh * tanh) * slope
        tl.store(active_ptr + place, 0.5 * before * (1.0 + tanh), real)
        tl.store(out_ptr + place, product * derivative, real)
    else:
        product = product + tl.load(bias_ptr + n * J + j, has_j, 0.0).to(tl.float32)[None, :]
        if EPILOGUE == "gelu":
            if KEEP:
                tl.store(before_ptr + place, product, real)
            product = 0.5 * product * (1.0 + tanh_of_gelu(product))
        tl.store(out_ptr + place, product, real)


def product(a_NSK: Tensor, b_NKJ: Tensor, bias_NJ: Tensor) -> Tensor:
    """Return a b + bias, (N, S, J)."""
    out_NSJ = a_NSK.new_empty(*a_NSK.shape[:2], b_NKJ.shape[2])
    _launch("bias", a_NSK, b_NKJ, out_NSJ, bias=bias_NJ.contiguous())
    return out_NSJ


def product_gelu(a_NSK: Tensor, b_NKJ: Tensor, bias_NJ: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    """Return gelu(h) and h = a b + bias, the latter empty if it is not kept."""
    out_NSJ = a_NSK.new_empty(*a_NSK.shape[:2], b_NKJ.shape[2])
    before_NSJ = torch.empty_like(out_NSJ) if keep else a_NSK.new_empty(0)
    _launch("gelu", a_NSK, b_NKJ, out_NSJ, bias=bias_NJ.contiguous(), before=before_NSJ, keep=keep)
    return out_NSJ, before_NSJ


def product_gelu_backward(a_NSK: Tensor, b_NKJ: Tensor, before_NSJ: Tensor) -> tuple[Tensor, Tensor]:
    """Return (a b) gelu'(before), the gradient before the activation, and gelu(before) for the weights' gradient."""
    out_NSJ, active_NSJ = torch.empty_like(before_NSJ), torch.empty_like(before_NSJ)
    _launch("backward", a_NSK, b_NKJ, out_NSJ, before=before_NSJ, active=active_NSJ)
    return out_NSJ, active_NSJ


def _launch(
    epilogue: str, a: Tensor, b: Tensor, out: Tensor, *, bias: Tensor | None = None, before: Tensor | None = None,
    active: Tensor | None = None, keep: bool = False,
) -> None:  # fmt: skip
    N, S, J = out.shape
    if S * a.stride(1) >= 1 << 31:  # places in an expert's rows are 32-bit numbers; those of experts are not
        raise ValueError(f"the kernel takes less than 2^31 numbers an expert, got {S} rows of {a.stride(1)}")
    tile = tile_for(S)
    launch(
        product_kernel, (triton.cdiv(S, tile["BLOCK_S"]), triton.cdiv(J, tile["BLOCK_J"]), N),
        a, b, bias, before, out, active, S, J, a.shape[2], *a.stride(), *b.stride(),
        EPILOGUE=epilogue, KEEP=keep, PRECISION=precision(), **tile, num_warps=8 if tile["BLOCK_S"] > 32 else 4,
    )  # fmt: skip


def tile_for(rows: int) -> dict[str, Any]:
    """Choose a tile with no more rows than there are: with few rows the time is that of reading weights."""
    return {"BLOCK_S": min(64, max(16, triton.next_power_of_2(rows))), "BLOCK_J": 128, "BLOCK_K": depth()}
