"""The experts' batched products, with gradients of the weights that land where they are wanted.

Letters: N experts, S rows per expert, I and O numbers in and out. A weight is (N, I, O), or (N, O, I) if transposed.

Autograd's own rule would give the gradient of a transposed weight in the other layout and copy it; and it allocates
each gradient anew, hundreds of megabytes whose pages the system must clear before they are written once. With few rows
an expert, in training on a CPU, the products are those of rows.cpp.
"""

from collections import deque
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from softmoe.moe import rows

OUT = 2
"""Gradients of one shape that are written or used up at the same time."""
_Kind = tuple[torch.Size, torch.dtype, torch.device]


class GradientPool:
    """Memory of weight gradients that are done with, for the next ones of the same shape.

    Who has one trains in one process, on plain tensors: that is what the compiled products ask for too.

    Whoever uses up gradients during the backward pass gives them back; nobody may keep a reference to one.
    """

    def __init__(self) -> None:
        self._free: dict[_Kind, list[Tensor]] = {}
        self._coming: dict[_Kind, deque[tuple[Tensor, Future[None]]]] = {}
        self._squares: dict[int, tuple[Tensor, int, float] | None] = {}
        """Of a weight, by address: its gradient, the gradient's version and the sum of its squares; None if it got
        several gradients."""

    def take(self, shape: torch.Size, like: Tensor) -> Tensor:
        """Rather than have more than OUT of a kind, it waits for the first that is still used."""
        key = (shape, like.dtype, like.device)
        free, coming = self._free.setdefault(key, []), self._coming.setdefault(key, deque())
        while coming and (coming[0][1].done() or (not free and len(coming) >= OUT)):
            gradient, done = coming.popleft()
            done.exception()  # waits; whoever started it raises it
            free.append(gradient)
        return free.pop() if free else torch.empty(shape, dtype=like.dtype, device=like.device)

    def give(self, gradient: Tensor, after: Future[None] | None = None) -> None:
        """It may be used again, or may be so `after` something is done."""
        key = (gradient.shape, gradient.dtype, gradient.device)
        if after is None:
            self._free.setdefault(key, []).append(gradient)
        else:
            self._coming.setdefault(key, deque()).append((gradient, after))

    def forget(self) -> None:
        """The sums: their gradients are done with."""
        self._squares.clear()

    def outer(self, a_NSP: Tensor, b_NSQ: Tensor, w_NPQ: Tensor) -> Tensor:
        """a^T b, the gradient of w, by rows.cpp, which adds up the squares of what it writes."""
        gradient = self.take(w_NPQ.shape, w_NPQ)
        squares = rows.outer(a_NSP, b_NSQ, gradient)
        first = w_NPQ.data_ptr() not in self._squares
        # detached, since autograd copies a gradient that somebody else has
        self._squares[w_NPQ.data_ptr()] = (gradient.detach(), gradient._version, squares) if first else None
        return gradient

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Of all together. What was added up when it was written is not read again."""
        sums = filter(None, self._squares.values())
        known = {gradient.data_ptr(): squares for gradient, version, squares in sums if gradient._version == version}
        norm = torch.nn.utils.get_total_norm([g for g in gradients if g.data_ptr() not in known])
        found = [known[g.data_ptr()] for g in gradients if g.data_ptr() in known]
        return norm if not found else (norm.square() + sum(found)).sqrt()


def batched_linear(
    x_NSI: Tensor, w: Tensor, b_NO: Tensor, *, transposed: bool = False, pool: GradientPool | None = None
) -> Tensor:
    """x w + b, (N, S, O). Autocast is followed here, since it does not see into a Function; compilers see neither."""
    if torch.compiler.is_compiling():
        return _plain(x_NSI, w, b_NO, transposed)
    kind = x_NSI.device.type
    if torch.amp.autocast_mode.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x_NSI, w, b_NO = x_NSI.to(dtype), w.to(dtype), b_NO.to(dtype)
    if pool is not None and rows.serve(x_NSI, w, b_NO):
        x_NSI = x_NSI.contiguous()  # once, for both passes
    return _BatchedLinear.apply(x_NSI, w, b_NO, transposed, pool)  # pyright: ignore[reportReturnType]


def _plain(x_NSI: Tensor, w: Tensor, b_NO: Tensor, transposed: bool) -> Tensor:
    return torch.baddbmm(b_NO.unsqueeze(1), x_NSI, w.transpose(1, 2) if transposed else w)


class _BatchedLinear(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x_NSI: Tensor, w: Tensor, b_NO: Tensor, transposed: bool, pool: GradientPool | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if pool is not None and rows.serve(x_NSI, w, b_NO):
            return rows.along(x_NSI, w, b_NO) if transposed else rows.across(x_NSI, w, b_NO)
        return _plain(x_NSI, w, b_NO, transposed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x_NSI, w, _, ctx.transposed, ctx.pool = inputs
        ctx.save_for_backward(x_NSI, w)
        ctx.save_for_forward(x_NSI, w)

    @staticmethod
    def backward(ctx: Any, dy_NSO: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_NSI, w = ctx.saved_tensors
        needs_x, needs_w, needs_b = ctx.needs_input_grad[:3]
        pool = None if torch.is_grad_enabled() else ctx.pool  # a gradient that may itself be derived is not reused
        served = pool is not None and rows.serve(x_NSI, w, dy_NSO)
        dy_NSO = dy_NSO.contiguous() if served else dy_NSO
        left, right = (dy_NSO, x_NSI) if ctx.transposed else (x_NSI, dy_NSO)
        dx_NSI = dw = None
        if pool is not None and served:
            if needs_x:
                dx_NSI = rows.across(dy_NSO, w) if ctx.transposed else rows.along(dy_NSO, w)
            if needs_w:
                dw = pool.outer(left, right, w)
        else:
            if needs_x:
                dx_NSI = torch.bmm(dy_NSO, w if ctx.transposed else w.transpose(1, 2))
            if needs_w:
                dw = torch.bmm(left.transpose(1, 2), right, out=None if pool is None else pool.take(w.shape, w))
        return dx_NSI, dw, dy_NSO.sum(1) if needs_b else None, None, None

    @staticmethod
    def jvp(ctx: Any, dx_NSI: Tensor, dw: Tensor, db_NO: Tensor, *_: None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_NSI, w = ctx.saved_tensors
        moved = torch.bmm(x_NSI, dw.transpose(1, 2) if ctx.transposed else dw)
        return _plain(dx_NSI, w, db_NO, ctx.transposed) + moved
