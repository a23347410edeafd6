"""Soft MoE without combine: slots go on as the tokens. This is ours, not the paper's: see docs/choices.md.

Letters: B images, M tokens, D width, N experts, P slots per expert, S = N*P slots.

The first layer with experts dispatches the tokens into slots and stops there. The slots, with what the experts add to
them, are the tokens of all later blocks, where every slot keeps its expert and nothing is routed any more:

    weights = softmax over tokens of the router's logits
    slots   = weights.T @ tokens + experts(weights.T @ normalized tokens)

So later blocks have S tokens for M, which is less work where slots are fewer than tokens. There is no way back to the
tokens: it is for models that need one vector of an image, not one of each patch.
"""

from dataclasses import dataclass

from torch import Tensor

from softmoe.moe.experts import Experts
from softmoe.moe.layer import MoE, zero_masked
from softmoe.moe.routing import Router, Routing, at_least_one, check_tokens
from softmoe.moe.soft import DenseRouting, SoftRouter


class ToSlots(MoE):
    """The layer in which tokens become slots: (B, M, D) -> (B, S, D), slot p of expert n is token n * P + p."""

    def __init__(self, router: Router, experts: Experts):
        if not isinstance(router, SoftRouter):
            raise ValueError(f"slots that stay are learned averages, as a SoftRouter makes them, got {router}")
        super().__init__(router, experts)
        self.slots_per_expert = router.slots_per_expert

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: Tensor, mask: Tensor | None = None, grid: tuple[int, int] | None = None, *, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the slots of `residual`, the tokens as they are without the norm, and what experts make of those of x.

        Both are mixed by the same weights, which are found in x.
        """
        if x.shape != residual.shape:
            raise ValueError(f"expected tokens and residual tokens of one shape, got {x.shape} and {residual.shape}")
        B = x.shape[0]
        real_BMD, residual_BMD = (t if mask is None else zero_masked(t, mask, self.router.dim) for t in (x, residual))
        routing = self.route(real_BMD, mask, grid)
        outputs_NSD = self.experts(routing.dispatch(real_BMD))
        slots_NSD, P = routing.dispatch(residual_BMD), self.slots_per_expert
        return slots_to_tokens(slots_NSD, B, P), slots_to_tokens(outputs_NSD, B, P)


class SlotsRouter(Router):
    """The router of the layers after ToSlots: tokens are slots already, and each stays with its expert."""

    def __init__(self, dim: int, num_experts: int, slots_per_expert: int = 1):
        super().__init__(dim, num_experts)
        self.slots_per_expert = at_least_one("slots_per_expert", slots_per_expert)

    def forward(self, x_BMD: Tensor, mask: Tensor | None = None) -> "SlotsRouting":
        check_tokens(x_BMD, mask, self.dim)
        B, M, _ = x_BMD.shape
        slots = self.num_experts * self.slots_per_expert
        if slots != M or mask is not None:
            raise ValueError(
                f"expected the {self.num_experts} x {self.slots_per_expert} slots of an earlier layer, without a mask, "
                f"got {M} tokens"
            )
        return SlotsRouting(B, self.num_experts, self.slots_per_expert, x_BMD)


@dataclass(frozen=True)
class SlotsRouting(Routing):
    """A routing that moves nothing: slots are handed to their experts as they lie."""

    images: int
    num_experts: int
    slots_per_expert: int
    like: Tensor

    def dispatch(self, x_BMD: Tensor) -> Tensor:
        B, N, P = self.images, self.num_experts, self.slots_per_expert
        return x_BMD.unflatten(1, (N, P)).transpose(0, 1).reshape(N, B * P, x_BMD.shape[-1])

    def combine(self, slots_NSD: Tensor) -> Tensor:
        return slots_to_tokens(slots_NSD, self.images, self.slots_per_expert)

    @property
    def auxiliary_loss(self) -> Tensor:
        return self.like.new_zeros(())


def slots_to_tokens(slots_NSD: Tensor, images: int, slots_per_expert: int) -> Tensor:
    """Return slots, which lie by experts, as the tokens of each image: (N, B*P, D) -> (B, N*P, D)."""
    return slots_NSD.unflatten(1, (images, slots_per_expert)).transpose(0, 1).flatten(1, 2)


class NotCombined(DenseRouting):
    """The routing of a ToSlots layer as it is recorded: no token asks for slots, so the combine weights are even.

    Both weights are computed when they are read: every training step records its routings.
    """

    def __init__(self, routing: Routing):
        assert isinstance(routing, DenseRouting)
        object.__setattr__(self, "routing", routing)

    routing: DenseRouting

    @property
    def dispatch_weights(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.routing.dispatch_weights

    @property
    def combine_weights(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        combine_BMNP = self.routing.combine_weights
        even_BM11 = combine_BMNP.mean((2, 3), keepdim=True)  # 1 / S, and 0 at masked tokens
        return even_BM11.expand_as(combine_BMNP)
