"""Stacked weights of few bits are multiplied by packed.cpp.

Without it everything falls back to torch's products, which compute the same more slowly.
"""

import ctypes
from functools import cache

import torch
from torch import Tensor

from softmoe.accelerate.build import Kernel, call

PANEL = 64  # outputs that lie side by side in the packed weights, as in packed.cpp
_NAMES = {
    torch.float32: "product_float32",
    torch.float16: "product_float16",
    torch.bfloat16: "product_bfloat16",
    torch.int8: "product_int8",
}


def self_test(library: ctypes.CDLL) -> bool:
    """Small whole numbers are exact in every type: compare with torch before anyone relies on it."""
    x = torch.arange(3 * 7 * 5).remainder(9).view(3, 7, 5).float() - 4
    w = torch.arange(3 * 2 * 5 * PANEL).remainder(11).view(3, 2, 5, PANEL).float() - 5
    bias = torch.arange(3 * 70).remainder(3).view(3, 70).float()
    plain = x @ w.transpose(1, 2).reshape(3, 5, 2 * PANEL)[..., :70] + bias.unsqueeze(1)
    return all(torch.equal(product(library, x, w.to(dtype), None, bias), plain) for dtype in _NAMES)


def product(
    library: ctypes.CDLL, x_NSK: Tensor, packed_NQKE: Tensor, scale_NC: Tensor | None, bias_NC: Tensor
) -> Tensor:
    N, S, K = x_NSK.shape
    C = bias_NC.shape[1]
    assert packed_NQKE.shape == (N, -(-C // PANEL), K, PANEL)
    assert x_NSK.dtype == bias_NC.dtype == torch.float32
    assert scale_NC is None or scale_NC.shape == bias_NC.shape
    assert all(t is None or t.is_contiguous() for t in (x_NSK, packed_NQKE, scale_NC, bias_NC))
    y_NSC = torch.empty(N, S, C)
    function = getattr(library, _NAMES[packed_NQKE.dtype])
    call(function, x_NSK, packed_NQKE, scale_NC, bias_NC, y_NSC, N, S, K, C)
    return y_NSC


KERNEL = Kernel("packed", self_test)


@torch.library.custom_op("softmoe::packed_product", mutates_args=(), device_types="cpu")
def packed_product(x_NSK: Tensor, packed_NQKE: Tensor, scale_NC: Tensor | None, bias_NC: Tensor) -> Tensor:
    """Compute (x @ w) * scale + bias for weights in panels. An operator of torch's, so that torch.compile takes it."""
    return product(KERNEL.library, x_NSK.contiguous(), packed_NQKE, scale_NC, bias_NC)


@cache
def has_bytes() -> bool:
    """Tell if the processor multiplies bytes (AVX-512 VNNI)."""
    if not KERNEL.available:
        return False
    x, w, ones = torch.zeros(1, 1, 4), torch.zeros(1, 1, 4 * PANEL, dtype=torch.int8), torch.ones(1, 1)
    return _call_bytes(x, w, ones, ones, ones) is not None


def _call_bytes(x_NSK: Tensor, packed: Tensor, scale_NC: Tensor, sums_NC: Tensor, bias_NC: Tensor) -> Tensor | None:
    N, S, K = x_NSK.shape
    C = bias_NC.shape[1]
    assert packed.numel() == N * -(-C // PANEL) * PANEL * K
    assert K % 4 == 0
    tensors = (x_NSK, packed, scale_NC, sums_NC, bias_NC)
    assert all(t.is_contiguous() for t in tensors)
    y_NSC = torch.empty(N, S, C)
    room = (y_NSC, torch.empty(N, S, K, dtype=torch.uint8), torch.empty(N, S, 2))
    done = call(KERNEL.library.product_bytes, *tensors, *room, N, S, K, C)
    return y_NSC if done else None


@torch.library.custom_op("softmoe::byte_product", mutates_args=(), device_types="cpu")
def byte_product(x_NSK: Tensor, packed: Tensor, scale_NC: Tensor, sums_NC: Tensor, bias_NC: Tensor) -> Tensor:
    """Compute packed_product for int8 weights with every row of x rounded to bytes too."""
    y_NSC = _call_bytes(x_NSK.contiguous(), packed, scale_NC, sums_NC, bias_NC)
    assert y_NSC is not None, "asked for on a processor that has no such product"
    return y_NSC


@byte_product.register_fake
def _byte_shape(x_NSK: Tensor, packed: Tensor, scale_NC: Tensor, sums_NC: Tensor, bias_NC: Tensor) -> Tensor:
    return x_NSK.new_empty(x_NSK.shape[0], x_NSK.shape[1], bias_NC.shape[1])


@packed_product.register_fake
def _shape(x_NSK: Tensor, packed_NQKE: Tensor, scale_NC: Tensor | None, bias_NC: Tensor) -> Tensor:
    return x_NSK.new_empty(x_NSK.shape[0], x_NSK.shape[1], bias_NC.shape[1])
