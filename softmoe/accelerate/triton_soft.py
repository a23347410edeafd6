"""Soft routing by Triton kernels on CUDA devices: neither softmax is ever stored, forward or backward.

Letters: B images, M tokens, D width, N experts, P slots per expert, S = N*P slots.

The kernels and what they compute are in kernels/soft.py. Products that need no softmax (those of the logits' gradient)
are torch's.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from softmoe.accelerate import fastest
from softmoe.accelerate.guards import Off, is_exporting, swap_class
from softmoe.accelerate.soft import LogitsRouting, in_autocast_dtype, similarity, similarity_gradient
from softmoe.moe import DenseRouting, PlacedRouter, SoftRouter
from softmoe.moe.routing import check_tokens, no_autocast
from softmoe.moe.soft import EPS, l2_normalize, softmax_over_slots, softmax_over_tokens


def switch_on(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
    fastest.need_triton(model)
    count = sum(
        swap_class(model, kind.plain_class, kind, again=True) for kind in (TritonSoftRouter, TritonPlacedRouter)
    )
    if not count:
        raise Off("no Soft router in this model")
    return f"{count} layers, for the shapes where they are faster"


class TritonRouting(LogitsRouting):
    def dispatch(self, x_BMD: Tensor) -> Tensor:
        x_BMD = in_autocast_dtype(x_BMD).contiguous()
        return soft_dispatch(*self._flat(self.dispatch_logits), x_BMD, self.dispatch_logits.shape[3])[0]

    def combine(self, slots_NSD: Tensor) -> Tensor:
        return soft_combine(*self._flat(self.combine_logits), in_autocast_dtype(slots_NSD).contiguous())[0]

    def _flat(self, logits_BMNP: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return logits (B, M, S) and the mask, laid out as the kernels read them."""
        return logits_BMNP.flatten(2).contiguous(), None if self.mask is None else self.mask.contiguous()


class _TritonMixin:
    """Overrides of a Soft router that use Triton kernels where they are faster; a base class before the router's."""

    use_kernels = False
    """Whether the kernels were the faster at the last call; a compiler that traces the router does the same."""

    def forward(self: Any, x_BMD: Tensor, mask: Tensor | None = None, *grid: Any) -> DenseRouting:
        if not torch.compiler.is_compiling():
            check_tokens(x_BMD, mask, self.dim)
            self.use_kernels = fastest.may_use(x_BMD, self.phi) and self.is_faster(x_BMD, mask)
        return super().forward(x_BMD, mask, *grid)  # pyright: ignore[reportAttributeAccessIssue]

    def is_faster(self: Any, x_BMD: Tensor, mask: Tensor | None) -> bool:
        shape = (self.num_experts, self.slots_per_expert)
        plain, kernel = (partial(way, self.scale is not None, shape, mask) for way in (by_torch, by_kernels))
        name = f"soft routing, {shape[1]} slots an expert" + (", mask" if mask is not None else "")
        return fastest.kernel_is_faster(name, plain, kernel, x_BMD, self.phi.float().flatten(1))

    def slot_vectors(self: Any) -> Tensor:
        with no_autocast(self.phi):
            slots_DS = self.phi.float().flatten(1)
            return slots_DS if self.scale is None else l2_normalize(slots_DS, dim=0) * self.scale.float()

    def by_kernels(self) -> bool:
        """True where the kernels are used; not in a file that is exported, which runs without this package."""
        return self.use_kernels and not is_exporting()

    def similarity(self: Any, x_BMD: Tensor) -> Tensor:
        if not self.by_kernels():
            return super().similarity(x_BMD)  # pyright: ignore[reportAttributeAccessIssue]
        return soft_logits(x_BMD.contiguous(), self.slot_vectors(), self.scale is not None)

    def routing(self: Any, dispatch_BMNP: Tensor, combine_BMNP: Tensor, mask: Tensor | None) -> DenseRouting:
        if not self.by_kernels():
            return super().routing(dispatch_BMNP, combine_BMNP, mask)  # pyright: ignore[reportAttributeAccessIssue]
        return TritonRouting(dispatch_BMNP, combine_BMNP, mask)


class TritonSoftRouter(_TritonMixin, SoftRouter):
    plain_class = SoftRouter


class TritonPlacedRouter(_TritonMixin, PlacedRouter):  # pyright: ignore[reportIncompatibleMethodOverride]
    plain_class = PlacedRouter


def by_torch(normalize: bool, shape: tuple[int, int], mask: Tensor | None, x_BMD: Tensor, slots_DS: Tensor) -> Tensor:
    """Compute logits, dispatch and combine with no experts between them, to be compared and timed."""
    with no_autocast(x_BMD):
        logits_BMNP = similarity(x_BMD, slots_DS, normalize).unflatten(2, shape)
    routing = DenseRouting(softmax_over_tokens(logits_BMNP, mask), softmax_over_slots(logits_BMNP, mask))
    return routing.combine(routing.dispatch(x_BMD))


def by_kernels(normalize: bool, shape: tuple[int, int], mask: Tensor | None, x_BMD: Tensor, slots_DS: Tensor) -> Tensor:
    """Compute what `by_torch` computes, by the kernels."""
    logits_BMNP = soft_logits(x_BMD.contiguous(), slots_DS, normalize).unflatten(2, shape)
    routing = TritonRouting(logits_BMNP, logits_BMNP, mask)
    return routing.combine(routing.dispatch(x_BMD))


@torch.library.custom_op("softmoe::soft_logits", mutates_args=())
def soft_logits(x_BMD: Tensor, slots_DS: Tensor, normalize: bool) -> Tensor:
    """Return the logits (B, M, S) in float32."""
    from softmoe.accelerate.kernels.soft import logits

    return logits(x_BMD, slots_DS.contiguous(), normalize, EPS)


@soft_logits.register_fake
def _(x_BMD: Tensor, slots_DS: Tensor, normalize: bool) -> Tensor:
    return slots_DS.new_empty(*x_BMD.shape[:2], slots_DS.shape[1])


def _save_logits(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.normalize = inputs[2]
    ctx.save_for_backward(*inputs[:2])


def _logits_backward(ctx: Any, d_BMS: Tensor) -> tuple[Tensor | None, ...]:
    x_BMD, slots_DS = ctx.saved_tensors
    return *similarity_gradient(d_BMS, x_BMD, slots_DS, ctx.normalize), None


soft_logits.register_autograd(_logits_backward, setup_context=_save_logits)


@torch.library.custom_op("softmoe::soft_dispatch", mutates_args=())
def soft_dispatch(logits_BMS: Tensor, mask: Tensor | None, x_BMD: Tensor, P: int) -> tuple[Tensor, Tensor]:
    """Return the slots (N, B*P, D), and the log-sum-exp of the logits over tokens (B, S)."""
    from softmoe.accelerate.kernels.soft import log_sum_exp, to_slots

    sums_BS = log_sum_exp(logits_BMS, mask, over_tokens=True)
    return to_slots(logits_BMS, sums_BS, mask, x_BMD, P, over_tokens=True), sums_BS


@soft_dispatch.register_fake
def _(logits_BMS: Tensor, mask: Tensor | None, x_BMD: Tensor, P: int) -> tuple[Tensor, Tensor]:
    B, _, S = logits_BMS.shape
    return x_BMD.new_empty(S // P, B * P, x_BMD.shape[2]), logits_BMS.new_empty(B, S)


@torch.library.custom_op("softmoe::soft_dispatch_backward", mutates_args=())
def soft_dispatch_backward(
    d_NSD: Tensor, logits_BMS: Tensor, mask: Tensor | None, x_BMD: Tensor, slots_NSD: Tensor, sums_BS: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of logits and tokens."""
    from softmoe.accelerate.kernels.soft import logits_gradient, to_tokens

    d_NSD = d_NSD.contiguous()
    mean_BS = by_image((slots_NSD.float() * d_NSD).sum(-1), logits_BMS)
    return (
        logits_gradient(logits_BMS, sums_BS, mean_BS, mask, x_BMD, d_NSD, over_tokens=True),
        to_tokens(logits_BMS, sums_BS, mask, d_NSD, over_tokens=True),
    )


@soft_dispatch_backward.register_fake
def _(
    d_NSD: Tensor, logits_BMS: Tensor, mask: Tensor | None, x_BMD: Tensor, slots_NSD: Tensor, sums_BS: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(logits_BMS), torch.empty_like(x_BMD)


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs[:3], *output)


def _dispatch_backward(ctx: Any, d_NSD: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    d_logits_BMS, d_x_BMD = soft_dispatch_backward(d_NSD, *ctx.saved_tensors)
    return d_logits_BMS, None, d_x_BMD, None


soft_dispatch.register_autograd(_dispatch_backward, setup_context=_save_dispatch)


@torch.library.custom_op("softmoe::soft_combine", mutates_args=())
def soft_combine(logits_BMS: Tensor, mask: Tensor | None, slots_NSD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens (B, M, D), and the log-sum-exp of the logits over slots (B, M)."""
    from softmoe.accelerate.kernels.soft import log_sum_exp, to_tokens

    sums_BM = log_sum_exp(logits_BMS, None, over_tokens=False)
    return to_tokens(logits_BMS, sums_BM, mask, slots_NSD, over_tokens=False), sums_BM


@soft_combine.register_fake
def _(logits_BMS: Tensor, mask: Tensor | None, slots_NSD: Tensor) -> tuple[Tensor, Tensor]:
    B, M, _ = logits_BMS.shape
    return slots_NSD.new_empty(B, M, slots_NSD.shape[2]), logits_BMS.new_empty(B, M)


@torch.library.custom_op("softmoe::soft_combine_backward", mutates_args=())
def soft_combine_backward(
    d_BMD: Tensor, logits_BMS: Tensor, mask: Tensor | None, slots_NSD: Tensor, y_BMD: Tensor, sums_BM: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of logits and slots."""
    from softmoe.accelerate.kernels.soft import logits_gradient, to_slots

    d_BMD = d_BMD.contiguous()
    mean_BM = (y_BMD.float() * d_BMD).sum(-1)
    P = slots_NSD.shape[1] // len(logits_BMS)
    return (
        logits_gradient(logits_BMS, sums_BM, mean_BM, mask, d_BMD, slots_NSD, over_tokens=False),
        to_slots(logits_BMS, sums_BM, mask, d_BMD, P, over_tokens=False),
    )


@soft_combine_backward.register_fake
def _(
    d_BMD: Tensor, logits_BMS: Tensor, mask: Tensor | None, slots_NSD: Tensor, y_BMD: Tensor, sums_BM: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(logits_BMS), torch.empty_like(slots_NSD)


def _combine_backward(ctx: Any, d_BMD: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    d_logits_BMS, d_slots_NSD = soft_combine_backward(d_BMD, *ctx.saved_tensors)
    return d_logits_BMS, None, d_slots_NSD


soft_combine.register_autograd(_combine_backward, setup_context=_save_dispatch)


def by_image(rows_NS: Tensor, logits_BMS: Tensor) -> Tensor:
    """Put the rows of an image together: (N, B*P) -> (B, N*P)."""
    return rows_NS.unflatten(1, (len(logits_BMS), -1)).transpose(0, 1).reshape(len(logits_BMS), -1).contiguous()
