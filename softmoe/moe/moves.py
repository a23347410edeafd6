"""Rows moved by index, to slots and back, with gradients that are moves again.

Letters: T tokens, R slots, D width. Slot r holds token `token_R[r]`, or none where that is T.

Autograd's own rules would weigh a copy of all slots, add rows one by one, and keep what it needs for both.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Moves(NamedTuple):
    token_R: Tensor
    order_R: Tensor
    """Slots by token, empty ones last."""
    first_T: Tensor
    """(T + 1,) where each token's slots begin in that order."""


def moves_of(token_R: Tensor, tokens: int) -> Moves:
    count_T = token_R.new_zeros(tokens + 1).index_add(0, token_R, torch.ones_like(token_R))
    return Moves(token_R, token_R.argsort(stable=True), count_T.cumsum(0) - count_T)


def to_slots(x_TD: Tensor, moves: Moves) -> Tensor:
    """(R, D): the row of each slot's token, zeros in empty slots."""
    return _ToSlots.apply(x_TD, *moves)  # pyright: ignore[reportReturnType]


def to_tokens(slots_RD: Tensor, weight_R: Tensor, moves: Moves) -> Tensor:
    """(T, D): each token's weighted sum of its slots."""
    return _ToTokens.apply(slots_RD, weight_R, *moves)  # pyright: ignore[reportReturnType]


class _ToSlots(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x_TD: Tensor, *moves: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows_TD = torch.cat([x_TD, x_TD.new_zeros(1, x_TD.shape[1])])  # the last row fills empty slots
        return rows_TD.index_select(0, moves[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, d_RD: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        moves = Moves(*ctx.saved_tensors)
        return to_tokens(d_RD, d_RD.new_ones(d_RD.shape[0]), moves), None, None, None

    @staticmethod
    def jvp(ctx: Any, dx_TD: Tensor, *_: None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return to_slots(dx_TD, Moves(*ctx.saved_tensors))


class _ToTokens(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(slots_RD: Tensor, weight_R: Tensor, *moves: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        _, order_R, first_T = moves
        return F.embedding_bag(order_R, slots_RD, first_T, mode="sum", per_sample_weights=weight_R[order_R])[:-1]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        slots_RD, weight_R, *moves = ctx.saved_tensors
        dy_RD = to_slots(dy_TD, Moves(*moves))
        d_weight_R = torch.linalg.vecdot(dy_RD, slots_RD) if ctx.needs_input_grad[1] else None
        d_slots_RD = dy_RD * weight_R.unsqueeze(1) if ctx.needs_input_grad[0] else None
        return d_slots_RD, d_weight_R, None, None, None

    @staticmethod
    def jvp(ctx: Any, d_slots_RD: Tensor, d_weight_R: Tensor, *_: None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        slots_RD, weight_R, *moves = ctx.saved_tensors
        return to_tokens(d_slots_RD, weight_R, Moves(*moves)) + to_tokens(slots_RD, d_weight_R, Moves(*moves))
