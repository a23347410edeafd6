"""Soft routing that keeps its logits for the backward pass and computes both softmaxes again, to take less memory.

Letters: B images, M tokens, D width, N experts, P slots per expert, S = N*P slots.

For the backward pass the plain router keeps both weights (B, M, S), copies of them in the type of the products, and the
normalized tokens. Here only the logits (those of dispatch and of combine, where a router has places for dispatch alone)
and the tokens as they came are kept. That costs two more softmaxes, so it is an
option: `keep_logits_only(model)`, or `--keep-logits-only` of a run.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from softmoe.accelerate.guards import plain_class
from softmoe.moe import DenseRouting, PlacedRouter, SoftRouter
from softmoe.moe.routing import no_autocast, routing_dtype
from softmoe.moe.soft import EPS, l2_normalize, softmax_over_slots, softmax_over_tokens


def keep_logits_only(model: nn.Module) -> int:
    """Make every Soft router of a model keep its logits alone; returns how many there are.

    A router that is already accelerated stays so; this is then what it does where its kernels do not apply.
    """
    routers = [module for module in model.modules() if plain_class(module) in FRUGAL]
    for router in routers:
        router.__class__ = frugal_class(type(router))
    return len(routers)


class LogitsRouting(DenseRouting):
    """A DenseRouting that holds the logits (B, M, N, P) of both weights, which are computed when they are read."""

    def __init__(self, dispatch_BMNP: Tensor, combine_BMNP: Tensor, mask: Tensor | None):
        object.__setattr__(self, "dispatch_logits", dispatch_BMNP)
        object.__setattr__(self, "combine_logits", combine_BMNP)
        object.__setattr__(self, "mask", mask)

    dispatch_logits: Tensor
    combine_logits: Tensor
    mask: Tensor | None

    @property
    def dispatch_weights(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return softmax_over_tokens(self.dispatch_logits, self.mask)

    @property
    def combine_weights(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return softmax_over_slots(self.combine_logits, self.mask)

    def dispatch(self, x_BMD: Tensor) -> Tensor:
        B, _, N, P = self.dispatch_logits.shape
        slots_BSD = _Dispatch.apply(self.dispatch_logits, in_autocast_dtype(x_BMD), self.mask)
        return slots_BSD.unflatten(1, (N, P)).transpose(0, 1).reshape(N, B * P, -1)  # pyright: ignore

    def combine(self, slots_NSD: Tensor) -> Tensor:
        return _Combine.apply(self.combine_logits, in_autocast_dtype(slots_NSD), self.mask)  # pyright: ignore[reportReturnType]


def in_autocast_dtype(x: Tensor) -> Tensor:
    """Return x in the dtype with which a product under autocast would compute."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


class LogitsOnlyMixin:
    """Overrides of a Soft router that keep only its logits for the backward pass; a base class before the router's."""

    def similarity(self: Any, x_BMD: Tensor) -> Tensor:
        dtype = routing_dtype(x_BMD.dtype)
        with no_autocast(x_BMD):
            slots_DS = self.phi.to(dtype).flatten(1)
            if self.scale is not None:
                slots_DS = l2_normalize(slots_DS, dim=0) * self.scale.to(dtype)
            return _Similarity.apply(x_BMD, slots_DS, self.scale is not None)  # pyright: ignore[reportReturnType]

    def routing(self, dispatch_BMNP: Tensor, combine_BMNP: Tensor, mask: Tensor | None) -> DenseRouting:
        return LogitsRouting(dispatch_BMNP, combine_BMNP, mask)


class FrugalSoftRouter(LogitsOnlyMixin, SoftRouter):
    plain_class = SoftRouter


class FrugalPlacedRouter(LogitsOnlyMixin, PlacedRouter):
    plain_class = PlacedRouter


FRUGAL: dict[type[nn.Module], type[nn.Module]] = {SoftRouter: FrugalSoftRouter, PlacedRouter: FrugalPlacedRouter}


@cache
def frugal_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a router that keeps its logits alone, made of a plain one or of an accelerated one."""
    if issubclass(kind, LogitsOnlyMixin):
        return kind
    frugal = FRUGAL[getattr(kind, "plain_class", kind)]
    return frugal if kind in FRUGAL else type(f"Frugal{kind.__name__}", (kind, frugal), {})


class _Similarity(torch.autograd.Function):
    """Computes x @ slots, over the length of x if `normalize`."""

    @staticmethod
    def forward(ctx: Any, x_BMD: Tensor, slots_DS: Tensor, normalize: bool) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x_BMD, slots_DS)
        ctx.normalize = normalize
        return similarity(x_BMD, slots_DS, normalize)

    @staticmethod
    def backward(ctx: Any, d_BMS: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_BMD, slots_DS = ctx.saved_tensors
        return *similarity_gradient(d_BMS, x_BMD, slots_DS, ctx.normalize), None


def similarity(x_BMD: Tensor, slots_DS: Tensor, normalize: bool) -> Tensor:
    tokens_BMD = x_BMD.to(slots_DS.dtype)
    return (l2_normalize(tokens_BMD, dim=-1) if normalize else tokens_BMD) @ slots_DS


def similarity_gradient(d_BMS: Tensor, x_BMD: Tensor, slots_DS: Tensor, normalize: bool) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and slots, from x as it came."""
    tokens_BMD = x_BMD.to(slots_DS.dtype)
    d_unit_BMD = d_BMS @ slots_DS.T
    if not normalize:
        return d_unit_BMD.to(x_BMD.dtype), tokens_BMD.flatten(0, 1).T @ d_BMS.flatten(0, 1)
    length_BM1 = torch.rsqrt(tokens_BMD.square().sum(-1, keepdim=True) + EPS)
    unit_BMD = tokens_BMD * length_BM1
    along_BM1 = torch.linalg.vecdot(d_unit_BMD, unit_BMD).unsqueeze(-1)
    d_x_BMD = length_BM1 * (d_unit_BMD - along_BM1 * unit_BMD)
    return d_x_BMD.to(x_BMD.dtype), unit_BMD.flatten(0, 1).T @ d_BMS.flatten(0, 1)


class _Dispatch(torch.autograd.Function):
    """Mixes tokens into slots: (B, M, N, P) logits and (B, M, D) tokens -> (B, S, D) slots."""

    @staticmethod
    def forward(ctx: Any, logits_BMNP: Tensor, x_BMD: Tensor, mask: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(logits_BMNP, x_BMD, mask)
        weights_BMS = softmax_over_tokens(logits_BMNP, mask).flatten(2).to(x_BMD.dtype)
        return weights_BMS.transpose(1, 2) @ x_BMD

    @staticmethod
    def backward(ctx: Any, d_BSD: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits_BMNP, x_BMD, mask = ctx.saved_tensors
        weights_BMS = softmax_over_tokens(logits_BMNP, mask).flatten(2)
        d_weights_BMS = (x_BMD @ d_BSD.transpose(1, 2)).to(weights_BMS.dtype)
        return (
            softmax_gradient(d_weights_BMS, weights_BMS, 1).view_as(logits_BMNP),
            weights_BMS.to(x_BMD.dtype) @ d_BSD,
            None,
        )


class _Combine(torch.autograd.Function):
    """Mixes slots into tokens: (B, M, N, P) logits and (N, B*P, D) slots -> (B, M, D) tokens."""

    @staticmethod
    def forward(ctx: Any, logits_BMNP: Tensor, slots_NSD: Tensor, mask: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(logits_BMNP, slots_NSD, mask)
        weights_BMS = softmax_over_slots(logits_BMNP, mask).flatten(2).to(slots_NSD.dtype)
        return weights_BMS @ by_image(slots_NSD, logits_BMNP)

    @staticmethod
    def backward(ctx: Any, d_BMD: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits_BMNP, slots_NSD, mask = ctx.saved_tensors
        B, _, N, P = logits_BMNP.shape
        weights_BMS = softmax_over_slots(logits_BMNP, mask).flatten(2)
        d_weights_BMS = (d_BMD @ by_image(slots_NSD, logits_BMNP).transpose(1, 2)).to(weights_BMS.dtype)
        d_slots_BSD = weights_BMS.to(slots_NSD.dtype).transpose(1, 2) @ d_BMD
        return (
            softmax_gradient(d_weights_BMS, weights_BMS, 2).view_as(logits_BMNP),
            d_slots_BSD.unflatten(1, (N, P)).transpose(0, 1).reshape(N, B * P, -1),
            None,
        )


def by_image(slots_NSD: Tensor, logits_BMNP: Tensor) -> Tensor:
    B, _, N, P = logits_BMNP.shape
    return slots_NSD.unflatten(1, (B, P)).transpose(0, 1).reshape(B, N * P, -1)


def softmax_gradient(d_weights: Tensor, weights: Tensor, dim: int) -> Tensor:
    return torch.ops.aten._softmax_backward_data(d_weights, weights, dim, weights.dtype)
