"""The product of two tiles, which all kernels share, and the precision in which float32 numbers are multiplied."""

import torch
import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def dot(a, b, total, PRECISION: tl.constexpr):
    """total + a b in float32. Triton's interpreter multiplies the bits of bfloat16 as if they were whole numbers."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)


def precision() -> str:
    """As torch is told to multiply on CUDA."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
