"""The layer: tokens in, tokens out. One device, torch only.

Names are loaded when first used: the configs of routers do without torch.
"""

from typing import TYPE_CHECKING

from softmoe.lazy import lazy_names

if TYPE_CHECKING:
    from softmoe.moe.config import (
        ExpertsChoiceConfig,
        IdentityConfig,
        PlacedConfig,
        RouterConfig,
        SoftConfig,
        SoftUniformConfig,
        SparseConfig,
        TokensChoiceConfig,
        UniformConfig,
        UniformSoftConfig,
    )
    from softmoe.moe.experts import Experts
    from softmoe.moe.fixed import IdentityRouter, SoftUniformRouter, UniformRouter, UniformSoftRouter
    from softmoe.moe.layer import ExpertsBeside, MoE, SoftMoE
    from softmoe.moe.placed import PlacedRouter
    from softmoe.moe.routing import Router, Routing, SparseRouting
    from softmoe.moe.slots import NotCombined, SlotsRouter, SlotsRouting, ToSlots
    from softmoe.moe.soft import DenseRouting, SoftRouter
    from softmoe.moe.sparse import ExpertsChoiceRouter, TokensChoiceRouter

_HOMES = {
    "config": (
        "ExpertsChoiceConfig",
        "IdentityConfig",
        "PlacedConfig",
        "RouterConfig",
        "SoftConfig",
        "SoftUniformConfig",
        "SparseConfig",
        "TokensChoiceConfig",
        "UniformConfig",
        "UniformSoftConfig",
    ),
    "experts": ("Experts",),
    "fixed": ("IdentityRouter", "SoftUniformRouter", "UniformRouter", "UniformSoftRouter"),
    "layer": ("ExpertsBeside", "MoE", "SoftMoE"),
    "placed": ("PlacedRouter",),
    "routing": ("Router", "Routing", "SparseRouting"),
    "slots": ("NotCombined", "SlotsRouter", "SlotsRouting", "ToSlots"),
    "soft": ("DenseRouting", "SoftRouter"),
    "sparse": ("ExpertsChoiceRouter", "TokensChoiceRouter"),
}

__all__ = [
    "DenseRouting",
    "Experts",
    "ExpertsBeside",
    "ExpertsChoiceConfig",
    "ExpertsChoiceRouter",
    "IdentityConfig",
    "IdentityRouter",
    "MoE",
    "NotCombined",
    "PlacedConfig",
    "PlacedRouter",
    "Router",
    "RouterConfig",
    "Routing",
    "SlotsRouter",
    "SlotsRouting",
    "SoftConfig",
    "SoftMoE",
    "SoftRouter",
    "SoftUniformConfig",
    "SoftUniformRouter",
    "SparseConfig",
    "SparseRouting",
    "ToSlots",
    "TokensChoiceConfig",
    "TokensChoiceRouter",
    "UniformConfig",
    "UniformRouter",
    "UniformSoftConfig",
    "UniformSoftRouter",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
