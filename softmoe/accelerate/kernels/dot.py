"""The parts that all kernels share: the product of two tiles, its precision for float32 numbers, and the launch."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def dot(a, b, total, PRECISION: tl.constexpr):
    """Return total + a b in float32. Triton's interpreter multiplies bits of bfloat16 as if they were whole numbers."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)


def precision() -> str:
    """Return how torch is told to multiply on CUDA, by its older switch (allow_tf32) or by its newer one."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def depth() -> int:
    """Return how many products a tile adds up at a time: half as many where they are exact and take more registers."""
    return 32 if precision() == "tf32" else 16


def launch(kernel: Any, grid: tuple[Any, ...], *arguments: Any, **constants: Any) -> None:
    """Launch on the device that the first tensor is on, which need not be the current one."""
    with torch.cuda.device_of(next(a for a in arguments if isinstance(a, Tensor))):
        kernel[grid](*arguments, **constants)
