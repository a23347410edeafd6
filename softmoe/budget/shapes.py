"""Derive from a configuration the numbers that all formulas share.

Letters: M tokens of an image (a class token included), D width, A heads, H hidden width, L blocks; per MoE layer
N experts, S rows that they process per image, all experts together.
"""

from dataclasses import dataclass
from fractions import Fraction

import torch

from softmoe.models import MoEConfig, ViTConfig
from softmoe.models.embed import SinCosPositions
from softmoe.models.vit import check
from softmoe.moe import Router, RouterConfig, SparseConfig
from softmoe.moe.sparse import SparseRouter

SPARSE = ("tokens_choice", "experts_choice")
MIXING = ("soft", "uniform", "soft_uniform", "uniform_soft")  # slots are averages of tokens: two dense products
LEARNED = ("soft", "soft_uniform", "uniform_soft")  # one more product, for the logits
KNOWN = (*SPARSE, *MIXING, "identity")


@dataclass(frozen=True)
class Routed:
    """One MoE layer. `rows` and `mask` are per image; groups may span images, so they may be fractions.

    layers       how many MoE layers the model has
    rows         S: rows that go through the experts
    slots        N * P, for routers with slot parameters
    capacity     rows per expert and group (sparse routers)
    mask         M * N * capacity: entries of the one-hot matrix of the paper's dispatcher, which ours never makes
    """

    router: str
    layers: int
    experts: int
    rows: Fraction
    slots: int = 0
    capacity: int = 0
    mask: Fraction = Fraction(0)


def checked(config: ViTConfig) -> ViTConfig:
    """Refuse what cannot be built. The model would say it too, but building one without storage takes torch seconds."""
    check(config)
    if config.width % config.heads:
        raise ValueError(f"heads must divide the width: {config.width} is not a multiple of {config.heads}")
    if min(config.grid) < 1:
        height, width = config.image_shape
        raise ValueError(f"image of {height} x {width} is smaller than one patch of {config.patch_size} pixels")
    if config.positions == "sincos":
        SinCosPositions((1, 1), config.width)
    if config.moe is not None:
        small_router(config.moe)
        config.moe.moe_blocks(config.depth)
    return config


def routed(config: ViTConfig) -> Routed | None:
    """Return the MoE layers of a model, or None for a dense one."""
    moe, layers = config.moe, len(config.moe_blocks)
    if moe is None or not layers:
        return None
    M, N = config.tokens, moe.num_experts
    name = counted_as(moe.router)
    if isinstance(moe.router, SparseConfig):
        group = moe.router.group_size or M
        capacity = sparse_capacity(moe, group)
        return Routed(
            name, layers, N, Fraction(N * capacity * M, group), capacity=capacity, mask=Fraction(M * N * capacity)
        )
    if name == "identity":
        return Routed(name, layers, N, Fraction(N * -(-M // N)))
    slots = N * vars(moe.router)["slots_per_expert"]
    return Routed(name, layers, N, Fraction(slots), slots=slots)


def counted_as(router: RouterConfig) -> str:
    """The router whose formulas hold: this one, or the nearest that its config inherits from."""
    names = [kind.name for kind in type(router).__mro__ if issubclass(kind, RouterConfig) and hasattr(kind, "name")]
    for name in names:
        if name in KNOWN:
            return name
    raise ValueError(f"the cost of the router {router.name!r} is not known: its config inherits from none of ours")


def sparse_capacity(moe: MoEConfig, group_size: int) -> int:
    """Ask the router itself for its capacity, so that there is one rule."""
    router = small_router(moe)
    assert isinstance(router, SparseRouter)
    return router.capacity(group_size, vars(moe.router).get("top_k", 1))


def small_router(moe: MoEConfig) -> Router:
    """Build the router for tokens of width 1; the caller's random state stays as it is."""
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        return moe.router.build(1)
