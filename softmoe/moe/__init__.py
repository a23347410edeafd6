"""The layer: tokens in, tokens out. One device, torch only."""

from softmoe.moe.experts import Experts
from softmoe.moe.fixed import IdentityRouter, SoftUniformRouter, UniformRouter, UniformSoftRouter
from softmoe.moe.layer import MoE, SoftMoE
from softmoe.moe.routing import DenseRouting, Router, Routing, SparseRouting
from softmoe.moe.soft import SoftRouter
from softmoe.moe.sparse import ExpertsChoiceRouter, TokensChoiceRouter

__all__ = [
    "DenseRouting",
    "Experts",
    "ExpertsChoiceRouter",
    "IdentityRouter",
    "MoE",
    "Router",
    "Routing",
    "SoftMoE",
    "SoftRouter",
    "SoftUniformRouter",
    "SparseRouting",
    "TokensChoiceRouter",
    "UniformRouter",
    "UniformSoftRouter",
]
