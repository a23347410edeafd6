"""Triton kernel of AdamW with moments in bfloat16: one pass over a parameter, its gradient and its moments."""

import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from softmoe.accelerate.kernels.dot import launch


@triton.jit(do_not_specialize=["index"])
def adamw_kernel(
    weight_ptr, gradient_ptr, first_ptr, second_ptr, step_ptr, skip_ptr, noise_ptr, index, numbers,
    rate, beta1, beta2, log_beta1, log_beta2, eps, weight_decay,
    MAY_SKIP: tl.constexpr, PIECE: tl.constexpr, SHIFTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update a block of numbers; the second moment is rounded with the random numbers that a CPU takes for them.

    If MAY_SKIP, nothing changes where `skip` is not 0. The bias corrections are differences of numbers next to 1, so
    they are computed in float64, once in a program.
    """
    step = tl.load(step_ptr)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = place < numbers
    if MAY_SKIP:
        real = real & (tl.load(skip_ptr + place * 0) == 0)
    gradient = tl.load(gradient_ptr + place, real, 0.0).to(tl.float32)
    weight = tl.load(weight_ptr + place, real, 0.0).to(tl.float32)
    first = tl.load(first_ptr + place, real, 0.0).to(tl.float32)
    second = tl.load(second_ptr + place, real, 0.0).to(tl.float32)
    first = first + (1.0 - beta1) * (gradient - first)
    second = beta2 * second + (1.0 - beta2) * gradient * gradient
    correction1 = (1.0 - tl.exp((step * log_beta1).to(tl.float64))).to(tl.float32)
    correction2 = (1.0 - tl.exp((step * log_beta2).to(tl.float64))).to(tl.float32)
    below = tl.sqrt(second) / tl.sqrt(correction2) + eps
    weight = weight * (1.0 - rate * weight_decay) - rate / correction1 * first / below
    tl.store(weight_ptr + place, weight, real)
    tl.store(first_ptr + place, first, real)
    seed = step.to(tl.int64) * 0x9E3779B1 + tl.cast(index, tl.int64) * 0x85EBCA77 + place // PIECE * 0xC2B2AE3D
    noise = tl.load(noise_ptr + seed // 64 % SHIFTS + place % PIECE, real, 0)
    rounded = ((second.to(tl.int32, bitcast=True) + noise) & -65536).to(tl.float32, bitcast=True)
    tl.store(second_ptr + place, rounded, real)


def update(
    weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: Tensor, skip: Tensor | None,
    noise: Tensor, index: int, piece: int, shifts: int, group: dict[str, Any],
) -> None:  # fmt: skip
    """Update the parameter of that index in place, unless `skip` is 1; `step` counts this update already."""
    beta1, beta2 = group["betas"]
    launch(
        adamw_kernel, (triton.cdiv(weight.numel(), 1024),),
        weight, gradient, first, second, step, skip, noise, index, weight.numel(),
        group["lr"], beta1, beta2, _log(beta1), _log(beta2), group["eps"], group["weight_decay"],
        MAY_SKIP=skip is not None, PIECE=piece, SHIFTS=shifts, BLOCK=1024, num_warps=4,
    )  # fmt: skip


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf
