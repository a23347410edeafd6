"""The layer: tokens in, tokens out. One device, torch only."""

from softmoe.moe.experts import Experts
from softmoe.moe.fixed import (
    IdentityConfig,
    IdentityRouter,
    SoftUniformConfig,
    SoftUniformRouter,
    UniformConfig,
    UniformRouter,
    UniformSoftConfig,
    UniformSoftRouter,
)
from softmoe.moe.layer import ExpertsBeside, MoE, SoftMoE
from softmoe.moe.placed import PlacedConfig, PlacedRouter
from softmoe.moe.routing import Router, RouterConfig, Routing, SparseRouting
from softmoe.moe.soft import DenseRouting, SoftConfig, SoftRouter
from softmoe.moe.sparse import (
    ExpertsChoiceConfig,
    ExpertsChoiceRouter,
    SparseConfig,
    TokensChoiceConfig,
    TokensChoiceRouter,
)

__all__ = [
    "DenseRouting",
    "Experts",
    "ExpertsBeside",
    "ExpertsChoiceConfig",
    "ExpertsChoiceRouter",
    "IdentityConfig",
    "IdentityRouter",
    "MoE",
    "PlacedConfig",
    "PlacedRouter",
    "Router",
    "RouterConfig",
    "Routing",
    "SoftConfig",
    "SoftMoE",
    "SoftRouter",
    "SoftUniformConfig",
    "SoftUniformRouter",
    "SparseConfig",
    "SparseRouting",
    "TokensChoiceConfig",
    "TokensChoiceRouter",
    "UniformConfig",
    "UniformRouter",
    "UniformSoftConfig",
    "UniformSoftRouter",
]
