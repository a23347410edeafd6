"""The Soft router with everything that does not depend on the tokens computed once.

Letters: B images, M tokens, D width, N experts, P slots per expert, S = N*P slots.
"""

import torch
from torch import Tensor

from softmoe.moe import DenseRouting, Router, SoftRouter
from softmoe.moe.routing import check_tokens, no_autocast, routing_dtype
from softmoe.moe.soft import EPS, l2_normalize, softmax_over_slots, softmax_over_tokens


class PreparedSoftRouter(Router):
    """As `SoftRouter` in evaluation mode. Slot vectors are normalized and scaled when it is made; a token's length
    divides its logits instead of its D numbers."""

    def __init__(self, router: SoftRouter):
        super().__init__(router.dim, router.num_experts)
        self.slots_per_expert = router.slots_per_expert
        self.normalize = router.scale is not None
        with torch.no_grad():
            slots_DS = router.phi.to(routing_dtype(router.phi.dtype)).flatten(1)
            if router.scale is not None:
                slots_DS = l2_normalize(slots_DS, dim=0) * router.scale.to(slots_DS.dtype)
        if not slots_DS.isfinite().all():
            raise ValueError("its slot vectors are not finite numbers")
        self.slots: Tensor
        self.register_buffer("slots", slots_DS.clone())

    def forward(self, x_BMD: Tensor, mask: Tensor | None = None) -> DenseRouting:
        check_tokens(x_BMD, mask, self.dim)
        with no_autocast(x_BMD):
            tokens_BMD = x_BMD.to(self.slots.dtype)
            logits_BMS = tokens_BMD @ self.slots
            if self.normalize:
                logits_BMS = logits_BMS * torch.rsqrt(tokens_BMD.square().sum(-1, keepdim=True) + EPS)
        logits_BMNP = logits_BMS.unflatten(2, (self.num_experts, self.slots_per_expert))
        return DenseRouting(softmax_over_tokens(logits_BMNP, mask), softmax_over_slots(logits_BMNP, mask))

    def extra_repr(self) -> str:
        return f"{self.dim}, num_experts={self.num_experts}, slots_per_expert={self.slots_per_expert}"
