"""The paper's ablations (section 3.6, Appendix A): routers that mix tokens with fixed weights, one or both ways.

Letters: B images, M tokens, D width, N experts, P slots per expert.
"""

import torch
from torch import Tensor

from softmoe.moe.routing import Router, SparseRouting, at_least_one, check_tokens, routing_dtype
from softmoe.moe.soft import DenseRouting, SoftRouter, softmax_over_slots, softmax_over_tokens


class IdentityRouter(Router):
    """A router that does not mix tokens: token i goes to expert i mod N, and comes back with weight 1.

    Every expert has ceil(M / N) rows, so that no token is ever dropped. With M = N dispatch and combine are the
    identity matrix.
    """

    def forward(self, x_BMD: Tensor, mask: Tensor | None = None) -> SparseRouting:
        check_tokens(x_BMD, mask, self.dim)
        B, M, _ = x_BMD.shape
        N = self.num_experts
        rounds = -(-M // N)
        token_NR = torch.arange(rounds * N, device=x_BMD.device).view(rounds, N).T.contiguous()
        image_B = torch.arange(B, device=x_BMD.device)
        token_NBR = token_NR[:, None, :] + M * image_B[None, :, None]
        filled_NBR = (token_NR < M)[:, None, :].expand_as(token_NBR)
        mask_T = x_BMD.new_ones(B * M, dtype=torch.bool) if mask is None else mask.flatten()
        filled_NBR = filled_NBR & mask_T[token_NBR.clamp(max=B * M - 1)]
        token_NS = torch.where(filled_NBR, token_NBR, B * M).flatten(1)
        gate_NS = filled_NBR.flatten(1).to(routing_dtype(x_BMD.dtype))
        return SparseRouting(token_NS, gate_NS, mask_T, (B, M))


class UniformRouter(Router):
    """A router whose slots are all the mean token, and whose tokens all get the mean slot.

    Experts then differ only by their initial weights.
    """

    def __init__(self, dim: int, num_experts: int, slots_per_expert: int = 1):
        super().__init__(dim, num_experts)
        self.slots_per_expert = at_least_one("slots_per_expert", slots_per_expert)

    def forward(self, x_BMD: Tensor, mask: Tensor | None = None) -> DenseRouting:
        check_tokens(x_BMD, mask, self.dim)
        B, M, _ = x_BMD.shape
        flat_BMNP = torch.zeros(
            (B, M, self.num_experts, self.slots_per_expert), dtype=routing_dtype(x_BMD.dtype), device=x_BMD.device
        )
        return DenseRouting(softmax_over_tokens(flat_BMNP, mask), softmax_over_slots(flat_BMNP, mask))


class SoftUniformRouter(SoftRouter):
    """A router with learned dispatch and uniform combine: every token of an image gets the same update."""

    def routing(self, dispatch_BMNP: Tensor, combine_BMNP: Tensor, mask: Tensor | None) -> DenseRouting:
        return super().routing(dispatch_BMNP, torch.zeros_like(combine_BMNP), mask)


class UniformSoftRouter(SoftRouter):
    """A router with uniform dispatch and learned combine: every slot is the mean token."""

    def routing(self, dispatch_BMNP: Tensor, combine_BMNP: Tensor, mask: Tensor | None) -> DenseRouting:
        return super().routing(torch.zeros_like(dispatch_BMNP), combine_BMNP, mask)
