"""Soft MoE routing: Algorithm 1 of "From Sparse to Soft Mixtures of Experts" with the normalization of section 2.3.

Letters: B images, M tokens, D width, N experts, P slots per expert, S = N*P slots.

Each slot has a learned vector, a column of phi. With the tokens X of one image:

    logits   = normalize(X) @ (scale * normalize(phi))     (M, S)
    slots    = softmax(logits, over tokens).T @ X          dispatch: a slot is a weighted average of all tokens
    outputs  = each expert applied to its own P slots
    Y        = softmax(logits, over slots) @ outputs       combine: a token is a weighted average of all slot outputs

Only the logits see normalized tokens: the tokens that are mixed are the ones that came in.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from softmoe.moe.experts import lecun_normal_
from softmoe.moe.routing import (
    Router,
    Routing,
    at_least_one,
    check_tokens,
    no_autocast,
    not_negative,
    routing_dtype,
)

EPS = 1e-6  # inside the root, so that a zero vector has a zero direction and a finite gradient


class SoftRouter(Router):
    """The router of Soft MoE; slot (n, p) belongs to expert n. SoftConfig describes the options."""

    def __init__(
        self,
        dim: int,
        num_experts: int,
        slots_per_expert: int = 1,
        *,
        normalize: bool = True,
        noise_std: float = 0.0,
        scale_init: float = 1.0,
    ):
        super().__init__(dim, num_experts)
        self.slots_per_expert = at_least_one("slots_per_expert", slots_per_expert)
        self.noise_std = not_negative("noise_std", noise_std)
        self.scale_init = scale_init
        self.phi = nn.Parameter(torch.empty(dim, num_experts, slots_per_expert))
        self.scale = nn.Parameter(torch.empty(())) if normalize else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw phi with fan-in D*N, as the reference does: only its direction counts, and a small norm turns fast."""
        lecun_normal_(self.phi, fan_in=self.dim * self.num_experts)
        if self.scale is not None:
            nn.init.constant_(self.scale, self.scale_init)

    def extra_repr(self) -> str:
        return (
            f"{self.dim}, num_experts={self.num_experts}, slots_per_expert={self.slots_per_expert}, "
            f"normalize={self.scale is not None}"
        )

    def forward(self, x_BMD: Tensor, mask: Tensor | None = None) -> "DenseRouting":
        logits_BMNP = self.logits(x_BMD, mask)
        return self.routing(logits_BMNP, logits_BMNP, mask)

    def logits(self, x_BMD: Tensor, mask: Tensor | None = None) -> Tensor:
        check_tokens(x_BMD, mask, self.dim)
        logits_BMS = self.similarity(x_BMD)
        if self.training and self.noise_std > 0:
            logits_BMS = logits_BMS + self.noise_std * torch.randn_like(logits_BMS)
        return logits_BMS.unflatten(2, (self.num_experts, self.slots_per_expert))

    def similarity(self, x_BMD: Tensor) -> Tensor:
        """Compare every token with every slot vector: (B, M, S)."""
        dtype = routing_dtype(x_BMD.dtype)
        with no_autocast(x_BMD):
            tokens_BMD = x_BMD.to(dtype)
            slots_DS = self.phi.to(dtype).flatten(1)
            if self.scale is not None:
                tokens_BMD = l2_normalize(tokens_BMD, dim=-1)
                slots_DS = l2_normalize(slots_DS, dim=0) * self.scale.to(dtype)
            return tokens_BMD @ slots_DS

    def routing(self, dispatch_BMNP: Tensor, combine_BMNP: Tensor, mask: Tensor | None) -> "DenseRouting":
        """Make both weights of their logits, which are the same ones in Algorithm 1."""
        return DenseRouting(softmax_over_tokens(dispatch_BMNP, mask), softmax_over_slots(combine_BMNP, mask))


def l2_normalize(x: Tensor, dim: int) -> Tensor:
    return x * torch.rsqrt(x.square().sum(dim, keepdim=True) + EPS)


def softmax_over_tokens(logits_BMNP: Tensor, mask: Tensor | None) -> Tensor:
    """Return the dispatch weights. A masked token has weight 0, also in an image without any real token."""
    if mask is None:
        return logits_BMNP.softmax(dim=1)
    mask_BM11 = mask[:, :, None, None]
    lowest = torch.finfo(logits_BMNP.dtype).min
    return logits_BMNP.masked_fill(~mask_BM11, lowest).softmax(dim=1) * mask_BM11


def softmax_over_slots(logits_BMNP: Tensor, mask: Tensor | None) -> Tensor:
    """Return the combine weights, normalized over all N*P slots together; those of a masked token are 0."""
    weights_BMNP = logits_BMNP.flatten(2).softmax(dim=2).view_as(logits_BMNP)
    return weights_BMNP if mask is None else weights_BMNP * mask[:, :, None, None]


@dataclass(frozen=True)
class DenseRouting(Routing):
    """A routing in which every slot is a weighted average of tokens, and every token one of slots.

    Both weights are (B, M, N, P). Dispatch weights sum to 1 over M, combine weights over (N, P).
    """

    dispatch_weights: Tensor
    combine_weights: Tensor

    def dispatch(self, x_BMD: Tensor) -> Tensor:
        B, M, N, P = self.dispatch_weights.shape
        weights_BMS = self.dispatch_weights.flatten(2).to(x_BMD.dtype)
        slots_BSD = weights_BMS.transpose(1, 2) @ x_BMD
        return slots_BSD.unflatten(1, (N, P)).transpose(0, 1).reshape(N, B * P, x_BMD.shape[-1])

    def combine(self, slots_NSD: Tensor) -> Tensor:
        """Average the outputs of the experts, which come with S = B*P rows each."""
        B, M, N, P = self.combine_weights.shape
        slots_BSD = slots_NSD.unflatten(1, (B, P)).transpose(0, 1).reshape(B, N * P, slots_NSD.shape[-1])
        return self.combine_weights.flatten(2).to(slots_BSD.dtype) @ slots_BSD

    @property
    def auxiliary_loss(self) -> Tensor:
        return self.dispatch_weights.new_zeros(())
