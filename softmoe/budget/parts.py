"""Count parameters and multiply-accumulates of each part of a model, by closed formula.

`checked` and `routed` derive from a configuration the numbers that all formulas of this room share.

Letters: M tokens of an image (a class token included), D width, A heads, H hidden width, L blocks; per MoE layer
N experts, S rows that they process per image, all experts together. Where tokens are merged, later blocks have fewer.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple

import torch

from softmoe.models import MoEConfig, ViTConfig
from softmoe.models.embed import SinCosPositions
from softmoe.models.vit import check_vit
from softmoe.moe import Router, RouterConfig, SparseConfig
from softmoe.moe.sparse import SparseRouter

SPARSE = ("tokens_choice", "experts_choice")
MIXING = ("soft", "uniform", "soft_uniform", "uniform_soft")  # slots are averages of tokens: two dense products
LEARNED = ("soft", "soft_uniform", "uniform_soft")  # one more product, for the logits
KNOWN = (*SPARSE, *MIXING, "identity")
Factor = tuple[str | None, Fraction | int]
"""One factor of a product and the product's multiply-accumulates: a parameter, by the start of its name, or None."""


@dataclass(frozen=True)
class Routed:
    """The numbers of an MoE layer. `rows` and `mask` are per image, so they may be fractions if groups span images.

    layers       how many MoE layers the model has
    routing      how many of them route: where slots stay, the first one alone
    rows         S: rows that go through the experts
    slots        N * P, for routers with slot parameters
    capacity     rows per expert and group (sparse routers)
    mask         M * N * capacity: entries of the one-hot matrix of the paper's dispatcher, which ours never makes
    hidden       H of the experts
    kept         H of the MLPs beside the experts; 0 if experts stand in their place
    """

    router: str
    layers: int
    routing: int
    experts: int
    rows: Fraction
    slots: int = 0
    capacity: int = 0
    mask: Fraction = Fraction(0)
    hidden: int = 0
    kept: int = 0


def checked(config: ViTConfig) -> ViTConfig:
    """Raise ValueError for a model that cannot be built, without the seconds that building it takes."""
    check_vit(config)
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
    name, routing = counted_as(moe.router), 1 if moe.slots_stay else layers
    of_layer: dict[str, Any] = {"hidden": moe.hidden_dim(config.mlp_dim), "kept": moe.kept_width(config.mlp_dim)}
    if isinstance(moe.router, SparseConfig):
        group = moe.router.group_size or M
        capacity = sparse_capacity(moe, group)
        rows, mask = Fraction(N * capacity * M, group), Fraction(M * N * capacity)
        return Routed(name, layers, routing, N, rows, capacity=capacity, mask=mask, **of_layer)
    if name == "identity":
        return Routed(name, layers, routing, N, Fraction(N * -(-M // N)), **of_layer)
    slots = N * vars(moe.router)["slots_per_expert"]
    return Routed(name, layers, routing, N, Fraction(slots), slots=slots, **of_layer)


def mlp_widths(config: ViTConfig) -> list[int]:
    """Return the hidden width of each block's MLP: the kept one beside experts, 0 where they stand in its place."""
    moe = routed(config)
    return [moe.kept if moe and block in config.moe_blocks else config.mlp_dim for block in range(config.depth)]


def token_widths(config: ViTConfig) -> int:
    """Return the hidden numbers of all MLPs of the blocks for one image: tokens times width, added up."""
    return sum(M * H for M, H in zip(config.tokens_by_block[:-1], mlp_widths(config), strict=True))


def counted_as(router: RouterConfig) -> str:
    """Return the name of the router whose formulas apply: this one, or the nearest that its config inherits from."""
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


class Part(NamedTuple):
    """The cost of one part of a model."""

    params: int
    """Parameters."""
    macs: int
    """Multiply-accumulates of one image's forward pass, in matrix products and convolutions."""


def parts(config: ViTConfig, *, one_hot: bool = False) -> dict[str, Part]:
    """Return each part by its name.

    With `one_hot`, sparse routers pay for the two one-hot products of the paper's dispatcher.
    """
    c = config
    D, L = c.width, c.depth
    moe = routed(c)
    entering, widths = c.tokens_by_block[:-1], mlp_widths(c)
    mlps = Part(sum(mlp_params(D, H) for H in widths if H), token_widths(c) * 2 * D)
    routing, experts = Part(0, 0), Part(0, 0)
    if moe and c.moe:
        routing = Part(moe.routing * router_params(c.moe.router, D), round(moe.routing * router_macs(c, one_hot)))
        one_expert = mlp_params(D, moe.hidden)
        experts = Part(moe.layers * moe.experts * one_expert, round(moe.layers * 2 * moe.rows * D * moe.hidden))
    return {
        "embedding": embedding(c),
        "attention": Part(L * attention_params(c), sum(4 * M * D**2 + 2 * M**2 * D for M in entering)),
        "mlp": mlps,
        **({} if c.merge is None else {"merger": Part((2 + c.merge[1]) * D, 2 * patches(c) * c.merge[1] * D)}),
        "routing": routing,
        "experts": experts,
        "norm": Part(4 * L * D + 2 * D + (2 * L * D if c.layer_scale else 0), 0),
        "head": head(c),
    }


def embedding(config: ViTConfig) -> Part:
    """Count patches, positions, the class token, registers, and a norm before the blocks."""
    D, pixels = config.width, 3 * config.patch_size**2
    params = (pixels + 1) * D
    params += config.tokens * D if config.positions == "learned" else 0
    params += config.prefix * D + (2 * D if config.pre_norm else 0)
    return Part(params, patches(config) * pixels * D)


def head(config: ViTConfig) -> Part:
    """Count pooling, the tanh layer if there is one, and the classifier."""
    M, D, H = config.tokens_by_block[-1], config.width, config.mlp_dim
    params = macs = 0
    if config.pool == "attention":  # one learned query; an attention, a norm and an MLP; registers are not pooled
        M -= config.registers
        params += D + attention_params(config) + 2 * D + mlp_params(D, H)
        macs += 2 * D**2 + 2 * M * D**2 + 2 * M * D + 2 * D * H
    if config.representation_size:
        params += (config.pooled_width + 1) * config.representation_size
        macs += config.pooled_width * config.representation_size
    features, classes = config.head_width, config.num_classes or 0
    return Part(params + (features + 1) * classes, macs + features * classes)


def attention_params(config: ViTConfig) -> int:
    D = config.width
    return 4 * D**2 + 4 * D + (2 * D // config.heads if config.qk_norm else 0)


def mlp_params(D: int, H: int) -> int:
    return 2 * D * H + H + D


@cache
def router_params(router: RouterConfig, width: int) -> int:
    """Build the router and count its parameters, which holds for routers of anybody's too."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in router.build(width).parameters())


def router_macs(config: ViTConfig, one_hot: bool) -> Fraction:
    """Count logits, dispatch and combine of one layer that routes. Moving rows by index multiplies nothing.

    Where slots stay there is no combine, and dispatch mixes both the tokens and the normalized ones.
    """
    M, D, moe = config.tokens, config.width, routed(config)
    assert moe is not None
    if moe.router in SPARSE:
        return Fraction(M * moe.experts * D) + (2 * moe.mask * D if one_hot else 0)
    products = 2 * (moe.router in MIXING) + (moe.router in LEARNED)
    return Fraction(products * M * moe.slots * D)


def backward_macs(config: ViTConfig, learned: Collection[str] | None = None, *, one_hot: bool = False) -> int:
    """Count the multiply-accumulates of one image's backward pass.

    `learned` are the names of the parameters that are trained; None means all. Each factor of a product has a gradient
    that costs as much as the product. It is computed only if the factor is learned, or made by something that is.
    """
    total, flows = Fraction(0), False
    for name, macs in factors(config, one_hot):
        needed = flows if name is None else learned is None or any(one.startswith(name) for one in learned)
        total += macs * needed
        flows = flows or needed
    return round(total)


def factors(config: ViTConfig, one_hot: bool) -> Iterator[Factor]:
    """Yield the factors of all products in the order of the forward pass; parameters that are in none have 0.

    What stands side by side comes one after the other here, which counts up to a product too much where a trained MLP
    stands beside experts that are not, or a trained model has an attention pool that is not.
    """
    c, D, H, moe = config, config.width, config.mlp_dim, routed(config)
    yield "embed.proj.weight", embedding(c).macs  # pixels need no gradient
    yield from ((name, 0) for name in ("embed.", "class_token", "registers", "positions.", "pre_norm."))
    for block, (M, width) in enumerate(zip(c.tokens_by_block[:-1], mlp_widths(c), strict=True)):
        at = f"encoder.blocks.{block}."
        yield at + "norm1.", 0
        yield from attention_factors(f"{at}attention.", 3 * M * D**2, 2 * M**2 * D, M * D**2)
        yield from ((at + "scale1", 0), (at + "norm2.", 0))
        routes = moe is not None and block in c.moe_blocks
        if width:
            mlp = f"{at}mlp.mlp." if routes else f"{at}mlp."
            yield from (*product(mlp + "fc1.", M * D * width), *product(mlp + "fc2.", M * D * width))
        if moe and routes:
            yield from moe_factors(c, moe, f"{at}mlp.", one_hot, on_slots=c.last_map is not None and block > c.last_map)
        yield at + "scale2", 0
        if c.merge and block == c.merge[0]:
            mixed = patches(c) * c.merge[1] * D
            yield from ((at + "merger.norm.", 0), (None, 2 * mixed), (at + "merger.queries", mixed), (None, mixed))
    yield "encoder.norm.", 0
    if c.pool == "attention":
        M = c.tokens_by_block[-1] - c.registers
        yield from attention_factors("pool.attention.", (2 * M + 1) * D**2, 2 * M * D, D**2)
        yield from (("pool.", 0), *product("pool.mlp.fc1.", D * H), *product("pool.mlp.fc2.", D * H))
    yield from (("pool_norm.", 0), *product("pre_logits.", c.pooled_width * (c.representation_size or 0)))
    yield from product("head.", c.head_width * (c.num_classes or 0))


def product(layer: str, macs: int) -> tuple[Factor, ...]:
    """Return the factors of a linear layer: its input and its weight. The bias is in no product."""
    return (None, macs), (f"{layer}weight", macs), (f"{layer}bias", 0)


def attention_factors(at: str, into: int, mixed: int, out: int) -> Iterator[Factor]:
    yield from (*product(at + "qkv.", into), (at + "query_norm.", 0), (at + "key_norm.", 0))
    yield from ((None, 2 * mixed), *product(at + "out.", out))


def moe_factors(config: ViTConfig, moe: Routed, at: str, one_hot: bool, on_slots: bool) -> Iterator[Factor]:
    M, D = config.tokens, config.width
    mixed = M * moe.slots * D if moe.router in MIXING else moe.mask * D if one_hot else 0
    logits = M * D * (moe.experts if moe.router in SPARSE else moe.slots if moe.router in LEARNED else 0)
    inside = moe.rows * D * moe.hidden
    experts = ((None, inside), (at + "experts.w1", inside), (at + "experts.b1", 0))
    experts += ((None, inside), (at + "experts.w2", inside), (at + "experts.b2", 0))
    if on_slots:
        yield from experts
        return
    if config.last_map is not None:  # both the tokens and the normalized ones are dispatched, nothing is combined
        yield from ((None, logits + 2 * mixed), (at + "router.", logits), (None, 2 * mixed), *experts)
        return
    yield None, logits + mixed  # the tokens, which are compared and dispatched
    if moe.router in ("soft", "soft_uniform"):
        yield from ((at + "router.", logits), (None, mixed), *experts)  # None: the weights of dispatch
    else:  # those weights are fixed, or 0 and 1
        yield from (*experts, (at + "router.", logits))
    yield None, mixed  # the outputs that are combined
    if moe.router in ("soft", "uniform_soft", *SPARSE):
        yield None, mixed  # the weights of combine


def patches(config: ViTConfig) -> int:
    return config.grid[0] * config.grid[1]
