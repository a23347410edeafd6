"""The experts' batched products by experts.cpp, faster than torch's where each expert sees up to a few hundred rows.

The case: the products alone, 8 experts of 384 x 1536 on one thread of an AMD processor with AVX-512, GFLOP/s of x w,
x w^T and the weights' gradient in turns with torch's: 8 rows 61, 69, 91 to 28, 40, 32; 32 rows 87, 96, 86 to 58, 67,
65; 128 rows 98, 100, 95 to 83, 89, 90. Built for AVX2: 90, 95, 84 to 60, 68, 65 at 32 rows, 97, 95, 94 to 75, 87, 88
at 128.

Letters: N experts, S rows per expert, I and O numbers in and out. A weight is (N, I, O), or (N, O, I) if transposed;
where that does not matter its axes are J and K.

Gradients of weights are written where they are wanted, into memory that was used before (see buffers.py).
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from softmoe.accelerate.build import Kernel, call
from softmoe.accelerate.guards import (
    LANES,
    Off,
    backward_is_plain,
    has_no_hooks,
    plain_call,
    plain_float32,
    swap_class,
)
from softmoe.moe import Experts

try:
    from softmoe.accelerate.buffers import acquire, remember_squares
except ImportError:  # that technique was taken away

    def acquire(weight: Tensor) -> Tensor:
        return torch.empty_like(weight)

    def remember_squares(weight: Tensor, gradient: Tensor, squares: float) -> None:
        pass


MAX_ROWS = 512
"""Measured up to here: with 512 rows x w, x w^T and the gradient have 1.06, 1.05 and 0.93 of the speed of torch's, with
256 rows 1.1, 1.1 and 1.0. With more, few experts may not occupy all threads."""
LARGE = 1 << 25
"""Bytes of all weights; smaller ones may stay in a cache."""


def switch_on(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
    if why := KERNEL.why_not():
        raise Off(why)
    if not (count := swap_class(model, Experts, CompiledExperts)):
        raise Off("no experts in this model")
    return f"{count} layers"


class CompiledExperts(Experts):
    plain_class = Experts

    def forward(self, x_NSD: Tensor) -> Tensor:
        if not self._applies(x_NSD):
            return super().forward(x_NSD)
        x_NSD = x_NSD.contiguous()  # once, for both passes
        active_NSH = self._activate(batched_linear(x_NSD, self.w1, self.b1, False))
        active_NSH = F.dropout(active_NSH, self.dropout, self.training)
        y_NSD = batched_linear(active_NSH, self.w2, self.b2, True)
        return F.dropout(y_NSD, self.dropout, self.training)

    def _activate(self, hidden_NSH: Tensor) -> Tensor:
        """Apply GELU; without gradients in place, which takes 3.2 instead of 6.4 ms at 4,096 rows: no fresh pages."""
        in_place = getattr(self.gelu, "in_place", None)
        if in_place is None or torch.is_grad_enabled() or not has_no_hooks(self.gelu, nn.GELU):
            return self.gelu(hidden_NSH)
        return in_place(hidden_NSH)

    def _applies(self, x_NSD: Tensor) -> bool:
        """True for float32 rows of the right shape on a CPU that nobody traces or transforms."""
        tensors = (x_NSD, self.w1, self.b1, self.w2, self.b2)
        return (
            x_NSD.ndim == 3
            and x_NSD.shape[0] == self.num_experts
            and x_NSD.shape[2] == self.dim
            and plain_call(*tensors)
        )


@torch.library.custom_op("softmoe::batched_linear", mutates_args=(), device_types="cpu")
def batched_linear(x_NSI: Tensor, w: Tensor, b_NO: Tensor, transposed: bool) -> Tensor:
    """Return x w + b, (N, S, O)."""
    if kernel_supports(x_NSI, w, b_NO):
        return matmul_t(x_NSI, w, b_NO) if transposed else matmul(x_NSI, w, b_NO)
    return torch.baddbmm(b_NO.unsqueeze(1), x_NSI, w.transpose(1, 2) if transposed else w)


@batched_linear.register_fake
def _(x_NSI: Tensor, w: Tensor, b_NO: Tensor, transposed: bool) -> Tensor:
    return x_NSI.new_empty(x_NSI.shape[0], x_NSI.shape[1], b_NO.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_NSI, w, _, ctx.transposed = inputs
    ctx.save_for_backward(x_NSI, w)


def _backward(ctx: Any, dy_NSO: Tensor) -> tuple[Tensor | None, ...]:
    x_NSI, w = ctx.saved_tensors
    needs_x, needs_w, needs_b = ctx.needs_input_grad[:3]
    plain = backward_is_plain(dy_NSO)  # a gradient that may itself be differentiated is not written into used memory
    compiled = not plain and kernel_supports(x_NSI, w, dy_NSO)
    dy_NSO = dy_NSO.contiguous() if compiled else dy_NSO
    left, right = (dy_NSO, x_NSI) if ctx.transposed else (x_NSI, dy_NSO)
    dx_NSI = dw = None
    if needs_x:
        if compiled:
            dx_NSI = matmul(dy_NSO, w) if ctx.transposed else matmul_t(dy_NSO, w)
        else:
            dx_NSI = torch.bmm(dy_NSO, w if ctx.transposed else w.transpose(1, 2))
    if needs_w:
        if compiled:
            dw = acquire(w)
            remember_squares(w, dw, outer(left, right, dw))
        else:
            dw = torch.bmm(left.transpose(1, 2), right, out=None if plain else acquire(w))
    return dx_NSI, dw, dy_NSO.sum(1) if needs_b else None, None


batched_linear.register_autograd(_backward, setup_context=_save)


def kernel_supports(x_NSI: Tensor, w: Tensor, *others: Tensor) -> bool:
    """True for plain float32 tensors on a CPU, at least one row and at most MAX_ROWS, large weights."""
    return (
        0 < x_NSI.shape[1] <= MAX_ROWS
        and w.nbytes >= LARGE
        and w.shape[2] % LANES == 0
        and plain_float32(x_NSI, w, *others)
        and w.is_contiguous()
        and KERNEL.available
    )


def matmul(x_NSJ: Tensor, w_NJK: Tensor, bias_NK: Tensor | None = None) -> Tensor:
    """Return x w + bias, (N, S, K)."""
    return _product(KERNEL.library.matmul, x_NSJ, w_NJK, bias_NK, w_NJK.shape[2])


def matmul_t(x_NSK: Tensor, w_NJK: Tensor, bias_NJ: Tensor | None = None) -> Tensor:
    """Return x w^T + bias, (N, S, J)."""
    return _product(KERNEL.library.matmul_t, x_NSK, w_NJK, bias_NJ, w_NJK.shape[1])


def outer(a_NSJ: Tensor, b_NSK: Tensor, out_NJK: Tensor) -> float:
    """Write a^T b to `out`, which begins at a multiple of 64 bytes, and return the sum of its squares."""
    return _outer(KERNEL.library, a_NSJ, b_NSK, out_NJK)


def _product(function: Callable[..., Any], x: Tensor, w: Tensor, bias: Tensor | None, width: int) -> Tensor:
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    y = x.new_empty(x.shape[0], x.shape[1], width)
    call(function, x, w, bias, y, x.shape[0], x.shape[1], w.shape[1], w.shape[2])
    return y


def _outer(library: ctypes.CDLL, a: Tensor, b: Tensor, out: Tensor) -> float:
    assert out.data_ptr() % 64 == 0
    a, b = a.contiguous(), b.contiguous()
    library.outer.restype = ctypes.c_double
    return call(library.outer, a, b, out, a.shape[0], a.shape[1], a.shape[2], b.shape[2])


def self_test(library: ctypes.CDLL) -> bool:
    """Compare with torch on whole numbers, which are exact in every order of summation.

    The second shape takes several blocks of rows and columns, and incomplete ones.
    """
    return all(_self_test(library, S, J, K) for S, J, K in ((5, 6, 32), (13, 200, 304)))


def _self_test(library: ctypes.CDLL, S: int, J: int, K: int) -> bool:
    x = torch.arange(2 * S * J).remainder(7).view(2, S, J).float() - 3
    w = torch.arange(2 * J * K).remainder(11).view(2, J, K).float() - 5
    y = _product(library.matmul, x, w, w[:, 0], K)
    back = _product(library.matmul_t, y, w, None, J)
    gradient = torch.empty_like(w)
    squares = _outer(library, x, y.remainder(7), gradient)
    exact = x @ w + w[:, :1]
    return (
        torch.equal(y, exact)
        and torch.equal(back, exact @ w.transpose(1, 2))
        and torch.equal(gradient, x.transpose(1, 2) @ exact.remainder(7))
        and squares == gradient.double().square().sum().item()
    )


KERNEL = Kernel("experts", self_test)
