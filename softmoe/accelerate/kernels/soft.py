"""Triton kernels of soft routing: logits, the two softmaxes' sums, mixing by either softmax, and the logits' gradient.

Letters: B images, M tokens, D width, N experts, P slots per expert, S = N*P slots.

The weights of dispatch (softmax over tokens) and of combine (softmax over slots) are never stored. They are formed from
the logits (B, M, S) and the logarithm of the softmax' sum, tile by tile, in front of the product that uses them, in the
forward pass and again in the backward pass.

Rows of slots lie as the experts have them, (N, B*P, D): slot s of image b begins at (s // P) B P D + (b P + s % P) D.
Tokens are the same with P = 1 and a group's stride of D.
"""

# pyright: reportPossiblyUnboundVariable=false
# (constants decide which names are bound)

import torch
import triton
import triton.language as tl
from torch import Tensor

from softmoe.accelerate.kernels.dot import depth, dot, launch, precision


@triton.jit
def logits_kernel(
    x_ptr, slots_ptr, out_ptr, T, D, S, eps,
    NORMALIZE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[t, s] = x[t] . slots[:, s] / sqrt(|x[t]|^2 + eps), the root only if NORMALIZE. All are row-major."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    s = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)
    product = tl.zeros((BLOCK_T, BLOCK_S), tl.float32)
    squares = tl.zeros((BLOCK_T,), tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        x = tl.load(x_ptr + t[:, None] * D + d[None, :], (t < T)[:, None] & (d < D)[None, :], 0.0).to(tl.float32)
        slots = tl.load(slots_ptr + d[:, None] * S + s[None, :], (d < D)[:, None] & (s < S)[None, :], 0.0)
        product = dot(x, slots, product, PRECISION)
        if NORMALIZE:
            squares += tl.sum(x * x, 1)
    if NORMALIZE:
        product = product * tl.rsqrt(squares + eps)[:, None]
    tl.store(out_ptr + t[:, None] * S + s[None, :], product, (t < T)[:, None] & (s < S)[None, :])


@triton.jit
def log_sum_exp_kernel(
    logits_ptr, mask_ptr, out_ptr, rows, columns, stride_b, stride_row, stride_column,
    HAS_MASK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """out[b, r] = log(sum over c of exp(logits[b, r, c])), over the columns that the mask (B, columns) has."""
    b = tl.program_id(1).to(tl.int64)
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    highest = tl.full((BLOCK_R,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_R,), tl.float32)
    for start in range(0, columns, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        counts = c < columns
        if HAS_MASK:
            counts = counts & (tl.load(mask_ptr + b * columns + c, counts, 0) != 0)
        place = b * stride_b + r[:, None] * stride_row + c[None, :] * stride_column
        logits = tl.load(logits_ptr + place, (r < rows)[:, None] & counts[None, :], -float("inf"))
        higher = tl.maximum(highest, tl.max(logits, 1))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(logits - higher[:, None]), 1)
        highest = higher
    tl.store(out_ptr + b * rows + r, highest + tl.log(total), r < rows)


@triton.jit
def mix_kernel(
    logits_ptr, sums_ptr, mask_ptr, in_ptr, out_ptr, rows, columns, D, stride_b, stride_row, stride_column,
    in_stride_b, in_stride_group, out_stride_b, out_stride_group,
    IN_GROUP: tl.constexpr, OUT_GROUP: tl.constexpr, SUMS_OF_ROWS: tl.constexpr, MASK: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[b, r] = sum over c of exp(logits[b, r, c] - sums[b, r or c]) in[b, c]. MASK: "rows", "columns" or "none"."""
    b = tl.program_id(2).to(tl.int64)
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    has_r = r < rows
    if SUMS_OF_ROWS:
        row_sums = tl.load(sums_ptr + b * rows + r, has_r, 0.0)
    real_r = has_r
    if MASK == "rows":
        real_r = has_r & (tl.load(mask_ptr + b * rows + r, has_r, 0) != 0)
    mixed = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for start in range(0, columns, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        has_c = c < columns
        if MASK == "columns":
            has_c = has_c & (tl.load(mask_ptr + b * columns + c, has_c, 0) != 0)
        real = real_r[:, None] & has_c[None, :]
        place = b * stride_b + r[:, None] * stride_row + c[None, :] * stride_column
        logits = tl.load(logits_ptr + place, real, -float("inf"))
        if SUMS_OF_ROWS:
            logits = logits - row_sums[:, None]
        else:
            logits = logits - tl.load(sums_ptr + b * columns + c, has_c, 0.0)[None, :]
        weights = tl.where(real, tl.exp(logits), 0.0)  # where no token is real the sum is no number
        row = b * in_stride_b + (c // IN_GROUP).to(tl.int64) * in_stride_group + (c % IN_GROUP) * D
        values = tl.load(in_ptr + row[:, None] + d[None, :], (c < columns)[:, None] & (d < D)[None, :], 0.0)
        mixed = dot(weights.to(values.dtype), values, mixed, PRECISION)
    row = b * out_stride_b + (r // OUT_GROUP).to(tl.int64) * out_stride_group + (r % OUT_GROUP) * D
    tl.store(out_ptr + row[:, None] + d[None, :], mixed, has_r[:, None] & (d < D)[None, :])


@triton.jit
def logits_gradient_kernel(
    logits_ptr, sums_ptr, mean_ptr, mask_ptr, tokens_ptr, slots_ptr, out_ptr, M, S, D,
    slots_stride_b, slots_stride_group,
    GROUP: tl.constexpr, OVER_TOKENS: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[b, m, s] = weight (tokens[b, m] . slots[b, s] - mean), the gradient of either softmax' logits.

    One of the two is what was mixed, the other the gradient of the mixture. `mean` is the sum of weight times product
    over the softmax' axis, which is the mixture times its gradient: (B, S) if OVER_TOKENS, else (B, M), as the sums.
    """
    b = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    s = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)
    has_m, has_s = m < M, s < S
    slot_row = b * slots_stride_b + (s // GROUP).to(tl.int64) * slots_stride_group + (s % GROUP) * D
    product = tl.zeros((BLOCK_M, BLOCK_S), tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        has_d = d < D
        tokens = tl.load(tokens_ptr + (b * M + m)[:, None] * D + d[None, :], has_m[:, None] & has_d[None, :], 0.0)
        slots = tl.load(slots_ptr + slot_row[None, :] + d[:, None], has_d[:, None] & has_s[None, :], 0.0)
        product = dot(tokens, slots, product, PRECISION)
    real_m = has_m
    if HAS_MASK:
        real_m = has_m & (tl.load(mask_ptr + b * M + m, has_m, 0) != 0)
    if OVER_TOKENS:
        sums = tl.load(sums_ptr + b * S + s, has_s, 0.0)[None, :]
        mean = tl.load(mean_ptr + b * S + s, has_s, 0.0)[None, :]
    else:
        sums = tl.load(sums_ptr + b * M + m, has_m, 0.0)[:, None]
        mean = tl.load(mean_ptr + b * M + m, has_m, 0.0)[:, None]
    place = (b * M + m)[:, None] * S + s[None, :]
    real = real_m[:, None] & has_s[None, :]
    weights = tl.exp(tl.load(logits_ptr + place, real, -float("inf")) - sums)
    gradient = tl.where(real, weights * (product - mean), 0.0)
    tl.store(out_ptr + place, gradient, has_m[:, None] & has_s[None, :])


TILE_R, TILE_D = 64, 128
WARPS = 8  # of a tile of 64 x 128 numbers: with 4 its sums alone take half of the registers


def logits(x_BMD: Tensor, slots_DS: Tensor, normalize: bool, eps: float) -> Tensor:
    B, M, D = x_BMD.shape
    S = slots_DS.shape[1]
    out_BMS = slots_DS.new_empty(B, M, S)
    grid = (triton.cdiv(B * M, 64), triton.cdiv(S, 64))
    launch(
        logits_kernel, grid, x_BMD, slots_DS, out_BMS, B * M, D, S, eps,
        NORMALIZE=normalize, PRECISION=precision(), BLOCK_T=64, BLOCK_S=64, BLOCK_D=depth(), num_warps=4,
    )  # fmt: skip
    return out_BMS


def log_sum_exp(logits_BMS: Tensor, mask: Tensor | None, *, over_tokens: bool) -> Tensor:
    """Return (B, S) over tokens, or (B, M) over slots."""
    B, M, S = logits_BMS.shape
    rows, columns, strides = (S, M, (1, S)) if over_tokens else (M, S, (S, 1))
    out = logits_BMS.new_empty(B, rows)
    launch(
        log_sum_exp_kernel,
        (triton.cdiv(rows, 32), B),
        logits_BMS,
        mask,
        out,
        rows,
        columns,
        M * S,
        *strides,
        HAS_MASK=mask is not None,
        BLOCK_R=32,
        BLOCK_C=64,
        num_warps=4,
    )
    return out


def to_slots(
    logits_BMS: Tensor, sums: Tensor, mask: Tensor | None, x_BMD: Tensor, P: int, *, over_tokens: bool
) -> Tensor:
    """Mix tokens into slots by the weights of either softmax: (B, M, D) -> (N, B*P, D)."""
    B, M, S = logits_BMS.shape
    D = x_BMD.shape[2]
    out_NSD = x_BMD.new_empty(S // P, B * P, D)
    launch(
        mix_kernel, (triton.cdiv(S, TILE_R), triton.cdiv(D, TILE_D), B),
        logits_BMS, sums, mask, x_BMD, out_NSD, S, M, D, M * S, 1, S, M * D, D, P * D, B * P * D,
        IN_GROUP=1, OUT_GROUP=P, SUMS_OF_ROWS=over_tokens, MASK="none" if mask is None else "columns",
        PRECISION=precision(), BLOCK_R=TILE_R, BLOCK_C=depth(), BLOCK_D=TILE_D, num_warps=WARPS,
    )  # fmt: skip
    return out_NSD


def to_tokens(logits_BMS: Tensor, sums: Tensor, mask: Tensor | None, slots_NSD: Tensor, *, over_tokens: bool) -> Tensor:
    """Mix slots into tokens by the weights of either softmax: (N, B*P, D) -> (B, M, D)."""
    B, M, S = logits_BMS.shape
    P, D = slots_NSD.shape[1] // B, slots_NSD.shape[2]
    out_BMD = slots_NSD.new_empty(B, M, D)
    launch(
        mix_kernel, (triton.cdiv(M, TILE_R), triton.cdiv(D, TILE_D), B),
        logits_BMS, sums, mask, slots_NSD, out_BMD, M, S, D, M * S, S, 1, P * D, B * P * D, M * D, D,
        IN_GROUP=P, OUT_GROUP=1, SUMS_OF_ROWS=not over_tokens, MASK="none" if mask is None else "rows",
        PRECISION=precision(), BLOCK_R=TILE_R, BLOCK_C=depth(), BLOCK_D=TILE_D, num_warps=WARPS,
    )  # fmt: skip
    return out_BMD


def logits_gradient(
    logits_BMS: Tensor, sums: Tensor, mean: Tensor, mask: Tensor | None, x_BMD: Tensor, slots_NSD: Tensor, *,
    over_tokens: bool,
) -> Tensor:  # fmt: skip
    B, M, S = logits_BMS.shape
    P, D = slots_NSD.shape[1] // B, slots_NSD.shape[2]
    out_BMS = torch.empty_like(logits_BMS)
    launch(
        logits_gradient_kernel, (triton.cdiv(M, 64), triton.cdiv(S, 64), B),
        logits_BMS, sums, mean, mask, x_BMD, slots_NSD, out_BMS, M, S, D, P * D, B * P * D,
        GROUP=P, OVER_TOKENS=over_tokens, HAS_MASK=mask is not None, PRECISION=precision(),
        BLOCK_M=64, BLOCK_S=64, BLOCK_D=depth(), num_warps=4,
    )  # fmt: skip
    return out_BMS
