"""MoE layers and routers for tests that go through several kinds of them."""

from typing import Any, TypeVar

import numpy as np
import torch
from oracle import Assignment

from softmoe.models import MoEConfig
from softmoe.models.moe_config import option_names
from softmoe.moe import SparseRouting
from softmoe.moe.sparse import SparseRouter

Kind = TypeVar("Kind", bound=SparseRouter)


def moe_of(router: str, num_experts: int, **options: Any) -> MoEConfig:
    """The layers with those of the options that this router has."""
    return MoEConfig.of(router, num_experts, **{k: v for k, v in options.items() if k in option_names(router)})


def gate_router(kind: type[Kind], N: int, **options: Any) -> Kind:
    """A sparse router whose logits are its input, so that tests say them directly."""
    router = kind(N, N, **options).double().eval().requires_grad_(False)
    router.weight.copy_(torch.eye(N))
    return router


def assignments(routing: SparseRouting, groups: int) -> list[Assignment]:
    """What a sparse routing says, in the form of the oracle."""
    capacity, tokens = routing.token_of_slot_NS.shape[1] // groups, routing.mask_T.numel()
    return [
        (int(routing.token_of_slot_NS[n, s]), n, s % capacity, float(routing.gate_NS[n, s]))
        for n, s in np.ndindex(*routing.token_of_slot_NS.shape)
        if routing.token_of_slot_NS[n, s] < tokens
    ]
