"""The contract between a router and the rest of an MoE layer.

Letters: B images, M tokens, D width, N experts, P slots per expert, S rows per expert (B*P for dense routings),
T = B*M tokens in all, R = N*S slots in all.

A router looks at the tokens and returns a `Routing`, which moves tokens into the experts' slots and their outputs back.
The experts never know which router filled their slots:

    routing = router(x_BMD, mask)
    y_BMD = routing.combine(experts(routing.dispatch(x_BMD)))
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, SupportsIndex

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Routing(ABC):
    """Moves the tokens of one batch into the experts' slots, and the experts' outputs back to the tokens."""

    @abstractmethod
    def dispatch(self, x_BMD: Tensor) -> Tensor:
        """Fill the slots: (B, M, D) -> (N, S, D)."""

    @abstractmethod
    def combine(self, slots_NSD: Tensor) -> Tensor:
        """Compute the tokens from the slots: (N, S, D) -> (B, M, D)."""

    @property
    @abstractmethod
    def auxiliary_loss(self) -> Tensor:
        """A scalar to add to the training loss, zero where the router has none."""


class Router(nn.Module, ABC):
    """The base of all routers: `router(x_BMD, mask=None) -> Routing`. The mask (B, M) is True at real tokens.

    A router that uses the place of a token sets `takes_grid` and is called with a third argument, the (rows, columns)
    of the image's patches, which are the last tokens; None for tokens of no image.
    """

    takes_grid: ClassVar[bool] = False

    def __init__(self, dim: int, num_experts: int):
        super().__init__()
        self.dim = at_least_one("dim", dim)
        self.num_experts = at_least_one("num_experts", num_experts)

    @abstractmethod
    def forward(self, x_BMD: Tensor, mask: Tensor | None = None) -> Routing: ...


@dataclass(frozen=True)
class SparseRouting(Routing):
    """A routing in which every slot holds at most one token; rows are moved by index.

    token_of_slot_NS   which of the B*M tokens the slot holds, or B*M where the slot is empty
    gate_NS            the weight of the slot's output in that token (0 where empty)
    mask_T             True at real tokens, flat over B*M
    """

    token_of_slot_NS: Tensor
    gate_NS: Tensor
    mask_T: Tensor
    shape: tuple[int, int]
    loss: Tensor | None = None
    moves: "Moves" = field(init=False, repr=False)

    def __post_init__(self) -> None:
        token_R = self.token_of_slot_NS.flatten()
        count_T = token_R.new_zeros(self.mask_T.numel() + 1).index_add(0, token_R, torch.ones_like(token_R))
        moves = Moves(token_R, token_R.argsort(stable=True), count_T.cumsum(0) - count_T)
        object.__setattr__(self, "moves", moves)  # the class is frozen; compilers do not take cached properties

    def dispatch(self, x_BMD: Tensor) -> Tensor:
        N, S = self.token_of_slot_NS.shape
        return to_slots(x_BMD.flatten(0, 1), self.moves).unflatten(0, (N, S))

    def combine(self, slots_NSD: Tensor) -> Tensor:
        gate_R = self.gate_NS.flatten().to(slots_NSD.dtype)
        return to_tokens(slots_NSD.flatten(0, 1), gate_R, self.moves).unflatten(0, self.shape)

    @property
    def auxiliary_loss(self) -> Tensor:
        return self.gate_NS.new_zeros(()) if self.loss is None else self.loss

    @property
    def experts_per_token(self) -> Tensor:
        """The number of experts that process each token, (B, M) int: of each it takes one slot at most."""
        return self.moves.first_T.diff().view(self.shape)

    @property
    def dropped(self) -> Tensor:
        """True at real tokens that no expert processes, (B, M) bool. The layer's output there is exactly 0."""
        return (self.experts_per_token == 0) & self.mask_T.view(self.shape)

    @property
    def load(self) -> Tensor:
        """The number of filled slots of each expert, (N,) int."""
        return (self.token_of_slot_NS < self.mask_T.numel()).sum(1)


def at_least_one(name: str, value: int) -> int:
    if not isinstance(value, SupportsIndex):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return value


def not_negative(name: str, value: float) -> float:
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value}")
    return value


def check_tokens(x_BMD: Tensor, mask: Tensor | None, dim: int) -> None:
    """Raise ValueError for tokens or a mask of the wrong shape or type, before a product further down fails."""
    if not isinstance(x_BMD, Tensor):
        raise ValueError(f"expected tokens as a tensor of torch, got {type(x_BMD).__name__}: torch.as_tensor makes one")
    if x_BMD.ndim != 3 or x_BMD.shape[-1] != dim:
        raise ValueError(f"expected tokens of shape (batch, tokens, {dim}), got {tuple(x_BMD.shape)}")
    if not x_BMD.is_floating_point():
        raise ValueError(f"expected tokens as vectors of real numbers, got {x_BMD.dtype}: embed indices first")
    if x_BMD.shape[1] == 0:
        raise ValueError(f"expected at least one token, got {tuple(x_BMD.shape)}")
    if mask is None:
        return
    if mask.ndim == 3:
        raise ValueError(
            f"expected a padding mask of shape (batch, tokens), got {tuple(mask.shape)}: routing mixes all tokens "
            "of a sequence, so attention masks (causal ones among them) cannot be honored"
        )
    if mask.shape != x_BMD.shape[:2] or mask.dtype != torch.bool:
        raise ValueError(
            f"expected a bool mask of shape {tuple(x_BMD.shape[:2])}, True at real tokens, "
            f"got {mask.dtype} of shape {tuple(mask.shape)}"
        )


def routing_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type that logits and softmaxes are computed in: float32 at least, whatever the model runs in."""
    return torch.promote_types(dtype, torch.float32)


def no_autocast(x: Tensor) -> AbstractContextManager:
    """Return a context without autocast, in which products keep the dtype of their factors."""
    if x.is_meta:  # has no autocast; torch 2.9 cannot compile its own is_autocast_available
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


class Moves(NamedTuple):
    """Holds the indices that move rows from tokens to slots and back: slot r holds token `token_R[r]`, or none (T).

    The gradient of each move is the other move. Autograd's own rules would multiply a copy of all slots, add rows one
    by one, and keep more tensors.
    """

    token_R: Tensor
    order_R: Tensor
    """Slots sorted by their token, empty ones last."""
    first_T: Tensor
    """(T + 1,) where each token's slots begin in that order."""


def to_slots(x_TD: Tensor, moves: Moves) -> Tensor:
    """Return for each slot the row of its token, (R, D), zeros in empty slots."""
    return _ToSlots.apply(x_TD, *moves)  # pyright: ignore[reportReturnType]


def to_tokens(slots_RD: Tensor, weight_R: Tensor, moves: Moves) -> Tensor:
    """Return for each token the weighted sum of its slots, (T, D)."""
    return _ToTokens.apply(slots_RD, weight_R, *moves)  # pyright: ignore[reportReturnType]


class _ToSlots(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x_TD: Tensor, token_R: Tensor, order_R: Tensor, first_T: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows_TD = torch.cat([x_TD, x_TD.new_zeros(1, x_TD.shape[1])])  # the last row fills empty slots
        return rows_TD.index_select(0, token_R)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        _, token_R, order_R, first_T = inputs
        ctx.save_for_backward(token_R, order_R, first_T)

    @staticmethod
    def backward(ctx: Any, d_RD: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        token_R, order_R, first_T = ctx.saved_tensors
        moves = Moves(token_R, order_R, first_T)
        return to_tokens(d_RD, d_RD.new_ones(d_RD.shape[0]), moves), None, None, None


class _ToTokens(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(slots_RD: Tensor, weight_R: Tensor, token_R: Tensor, order_R: Tensor, first_T: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return F.embedding_bag(order_R, slots_RD, first_T, mode="sum", per_sample_weights=weight_R[order_R])[:-1]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        slots_RD, weight_R, token_R, order_R, first_T = inputs
        ctx.save_for_backward(slots_RD, weight_R, token_R, order_R, first_T)

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        slots_RD, weight_R, token_R, order_R, first_T = ctx.saved_tensors
        dy_RD = to_slots(dy_TD, Moves(token_R, order_R, first_T))
        d_weight_R = torch.linalg.vecdot(dy_RD, slots_RD) if ctx.needs_input_grad[1] else None
        d_slots_RD = dy_RD * weight_R.unsqueeze(1) if ctx.needs_input_grad[0] else None
        return d_slots_RD, d_weight_R, None, None, None
