"""Measure how alike the slots' parameters are (the paper's Appendix J). Nothing here needs data.

Letters: D width, N experts, P slots per expert, S = N*P slots in the order of their experts.
"""

from typing import Any

import torch
from torch import Tensor

from softmoe.moe import Router, SoftRouter

DUPLICATE = 0.99  # cosine from which two slots ask for the same tokens
BLOCK = 1024


def slot_correlation(router: SoftRouter, first: int | None = None) -> Tensor:
    """Return the (S, S) inner products of normalized slot parameters, ordered by expert; of `first` slots if given."""
    phi_DS = router.phi.detach().flatten(1).double()[:, :first]
    unit_DS = torch.nn.functional.normalize(phi_DS, dim=0)
    return unit_DS.T @ unit_DS


@torch.no_grad()
def correlation_summary(router: Router) -> dict[str, Any] | None:
    """Return means of the inner products within and between experts, and the share of slots with a double elsewhere.

    Computed in blocks of rows, so thousands of slots need no matrix of all pairs. None for routers without slots.
    """
    if not isinstance(router, SoftRouter):
        return None
    N, P = router.num_experts, router.slots_per_expert
    S = N * P
    unit_DS = torch.nn.functional.normalize(router.phi.flatten(1).double(), dim=0)
    expert_S = torch.arange(S, device=unit_DS.device) // P
    own, other = -unit_DS.square().sum().item(), 0.0  # a slot with itself does not count
    doubles = 0
    largest = -1.0
    for start in range(0, S, BLOCK):
        rows = slice(start, min(start + BLOCK, S))
        cosine_RS = unit_DS[:, rows].T @ unit_DS
        same_RS = expert_S[rows, None] == expert_S[None, :]
        own += cosine_RS[same_RS].sum().item()
        between_RS = cosine_RS.masked_fill(same_RS, 0.0)
        other += between_RS.sum().item()
        if N > 1:
            nearest_R = cosine_RS.masked_fill(same_RS, -2.0).amax(1)
            doubles += int((nearest_R > DUPLICATE).sum())
            largest = max(largest, nearest_R.max().item())
    return {
        "within_expert": own / (S * (P - 1)) if P > 1 else None,
        "between_experts": other / (S * (S - P)) if N > 1 else None,
        "largest_between": largest if N > 1 else None,
        "duplicates": doubles / S,
        "scale": None if router.scale is None else router.scale.item(),
    }
