"""Count parameters, multiply-accumulates and FLOPs of any model or pair of towers, per image, without building it.

FLOPs outside the matrix products are counted as XLA does: 1 per element and operation; exp, tanh and rsqrt are free.
The coefficients of attention, MLP, experts, Soft, Tokens Choice and Experts Choice were read off XLA's analysis of the
reference code; whole models then agree with it to 0.002 % forward and 0.02 % in training (Tokens Choice 0.2 %). The
rest (no QK-norm, attention pooling, the tanh layer, fixed routers, merged tokens) follows from the same terms and is an
estimate. All of it is under 1 % of a usual model. Letters: see parts.py.
"""

from collections.abc import Collection
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, Literal, NamedTuple, get_args

from softmoe.budget.parts import SPARSE, Part, Routed, backward_macs, checked, parts, patches, routed, token_widths
from softmoe.models import TextConfig, TwoTower, TwoTowerConfig, VisionTransformer, ViTConfig, model_config
from softmoe.models.registry import override
from softmoe.models.two_tower import features_dim

Convention = Literal["ours", "paper"]


class RouterTerms(NamedTuple):
    """Coefficients of M*D, S*H, S*D, logits (M*slots, or M*N for sparse routers) and entries of the one-hot mask."""

    tokens: int
    hidden: int
    rows: int
    logits: int
    mask: int = 0


class Terms(NamedTuple):
    """Coefficients of the FLOPs outside matrix products, in one pass; _TERMS says of what."""

    tokens: int
    pairs: int
    head_rows: int
    token_rows: int
    hidden: int
    outside: int
    classes: int
    qk_norm: tuple[int, int]
    pool: int
    routers: dict[str, RouterTerms]


_TERMS: dict[str, tuple[Any, Any]] = {  # forward, and forward and backward
    "tokens": (34, 94),  # of M*D, per block
    "pairs": (4, 10),  # of A*M*M, per block
    "head_rows": (7, 35),  # of A*M, per block
    "token_rows": (8, 34),  # of M, per block
    "hidden": (9, 24),  # of M*H, per dense MLP
    "outside": (12, 27),  # of M*D, once
    "classes": (0, 14),  # of the classes, once
    "qk_norm": ((12, 7), (40, 35)),  # what a block saves without it: of M*D and of A*M
    "pool": (1, 3),
}
_ROUTER_TERMS = {
    "soft": (RouterTerms(4, 9, 3, 8), RouterTerms(14, 24, 7, 22)),
    "soft_uniform": (RouterTerms(4, 9, 3, 8), RouterTerms(14, 24, 7, 15)),
    "uniform_soft": (RouterTerms(4, 9, 3, 8), RouterTerms(14, 24, 7, 15)),
    "uniform": (RouterTerms(0, 9, 3, 8), RouterTerms(0, 24, 7, 8)),
    "identity": (RouterTerms(0, 9, 4, 0), RouterTerms(0, 24, 9, 0)),
    "tokens_choice": (RouterTerms(0, 9, 4, 4, mask=5), RouterTerms(0, 24, 9, 280, mask=9)),
    "experts_choice": (RouterTerms(0, 9, 4, 4, mask=5), RouterTerms(0, 24, 9, 90, mask=9)),
}
FORWARD, TRAIN = (
    Terms(
        **{name: both[k] for name, both in _TERMS.items()},
        routers={name: both[k] for name, both in _ROUTER_TERMS.items()},
    )
    for k in (0, 1)
)


def elementwise(config: ViTConfig, terms: Terms, *, one_hot: bool = False) -> int:
    """Return the FLOPs per image outside matrix products, forward (FORWARD) or forward and backward (TRAIN)."""
    c, t = config, terms
    D, A, H = c.width, c.heads, c.mlp_dim
    *entering, M = c.tokens_by_block
    tokens, head_rows = t.tokens, t.head_rows
    if not c.qk_norm:
        tokens, head_rows = tokens - t.qk_norm[0], head_rows - t.qk_norm[1]
    blocks = sum(tokens * m * D + t.pairs * A * m**2 + head_rows * A * m + t.token_rows * m for m in entering)
    moe = routed(c)
    hidden = token_widths(c) * t.hidden
    total = Fraction(blocks + hidden + t.outside * M * D + t.classes * (c.num_classes or 0))
    if c.pool == "attention":
        total += t.pool * (8 * M * D + 4 * A * M + 9 * H + 20 * D)
    total += t.pool * (c.representation_size or 0)
    total += t.pool * 7 * sum(c.tokens_by_block[block + 1] for block in c.head_blocks) * D  # norms and means
    if c.merge:  # a norm and a softmax
        total += t.pool * 8 * patches(c) * D + t.pairs * patches(c) * c.merge[1]
    if moe:
        terms_of = t.routers[moe.router]
        total += moe.routing * router_flops(c, moe, terms_of, one_hot) + moe.layers * expert_flops(c, moe, terms_of)
    return round(total)


def router_flops(config: ViTConfig, moe: Routed, terms: RouterTerms, one_hot: bool) -> Fraction:
    M, D = config.tokens, config.width
    logits = M * (moe.experts if moe.router in SPARSE else moe.slots)
    return Fraction(terms.tokens * M * D + terms.logits * logits) + (terms.mask * moe.mask if one_hot else 0)


def expert_flops(config: ViTConfig, moe: Routed, terms: RouterTerms) -> Fraction:
    return moe.rows * (terms.hidden * moe.hidden + terms.rows * config.width)


@dataclass(frozen=True)
class Cost:
    """The cost of a model, per image.

    params          all parameters
    macs            multiply-accumulates of the forward pass, in matrix products and convolutions
    forward_flops   2 per multiply-accumulate, and 1 per elementwise operation
    train_flops     those of forward and backward pass; the optimizer is not in it
    parts           name -> (params, macs); they sum to the totals
    """

    params: int
    macs: int
    forward_flops: int
    train_flops: int
    parts: dict[str, Part]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"parts": {name: part._asdict() for name, part in self.parts.items()}}


MAX_PARAMS, MAX_MACS = 10**18, 10**24


def cost(
    model: VisionTransformer | TwoTower | ViTConfig | TwoTowerConfig | str,
    *,
    convention: Convention = "ours",
    **overrides: Any,
) -> Cost:
    """Return what a model, its configuration or its name costs; `overrides` are those of `create_model`.

    Of two towers it is that of an image and its text.

    Sparse routers of this package move rows by index. `convention="paper"` counts the one-hot products of the paper's
    dispatcher instead, which its tables include; nothing else changes. Where a routing group spans images, a row of
    it is shared out among them, as in a batch of whole groups.
    """
    if convention not in get_args(Convention):
        raise ValueError(f"convention must be 'ours' or 'paper', got {convention!r}")
    if isinstance(model, TwoTower | TwoTowerConfig):
        return towers_cost(model if isinstance(model, TwoTowerConfig) else model.config, convention)
    config = checked(as_config(model, overrides))
    one_hot = convention == "paper"
    by_part = parts(config, one_hot=one_hot)
    params = sum(part.params for part in by_part.values())
    macs = sum(part.macs for part in by_part.values())
    if params > MAX_PARAMS or macs > MAX_MACS:
        raise ValueError("sizes of this model cannot be meant: it has over 10^18 parameters or 10^24 products an image")
    backward = backward_macs(config, one_hot=one_hot)
    return Cost(
        params=params,
        macs=macs,
        forward_flops=2 * macs + elementwise(config, FORWARD, one_hot=one_hot),
        train_flops=2 * macs + 2 * backward + elementwise(config, TRAIN, one_hot=one_hot),
        parts=by_part,
    )


def as_config(model: VisionTransformer | ViTConfig | str, overrides: dict[str, Any]) -> ViTConfig:
    if isinstance(model, str):
        return model_config(model, **overrides)
    config = model.config if isinstance(model, VisionTransformer) else model
    if not isinstance(config, ViTConfig):
        raise ValueError(f"expected a model, its configuration or its name, got {type(model).__name__}")
    return override(config, overrides)


def towers_cost(config: TwoTowerConfig, convention: Convention = "ours") -> Cost:
    """Return the cost of an image and a text of full length; what joins the towers is counted with the head."""
    width, out_dim = features_dim(config), config.embed_dim or features_dim(config)
    image, text = cost(config.image, convention=convention), text_cost(config.text, out_dim, convention)
    macs = 0 if config.embed_dim is None else width * out_dim
    joined = Part(macs + (out_dim if macs else 0) + (1 if config.bias_init is None else 2), macs)
    by_part = dict.fromkeys(image.parts, Part(0, 0))
    for name, part in [*image.parts.items(), *text.parts.items(), ("head", joined)]:
        place = "head" if name == "projection" else name
        by_part[place] = Part(*map(sum, zip(by_part[place], part, strict=True)))
    return Cost(
        params=image.params + text.params + joined.params,
        macs=image.macs + text.macs + macs,
        forward_flops=image.forward_flops + text.forward_flops + 2 * macs,
        train_flops=image.train_flops + text.train_flops + 6 * macs,
        parts=by_part,
    )


def text_cost(config: TextConfig, out_dim: int, convention: Convention = "ours") -> Cost:
    """Return the cost per text of full length.

    It is an image tower of as many tokens, whose embedding is looked up, not multiplied.
    """
    D, M = config.width, config.length
    twin = ViTConfig(
        image_size=(1, M),
        patch_size=1,
        width=D,
        depth=config.depth,
        mlp_dim=config.mlp_dim,
        heads=config.heads,
        num_classes=None,
        pool="mean" if config.pool == "last" else config.pool,
        qk_norm=config.qk_norm,
        moe=config.moe,
    )
    price = cost(twin, convention=convention)
    patches = price.parts["embedding"]
    tables = (config.vocab_size + config.tokens) * D + (D if config.pool == "class" else 0)
    projection = Part((D + 1) * out_dim, D * out_dim)
    macs = price.macs - patches.macs + projection.macs
    parts = price.parts | {"embedding": Part(tables, 0), "projection": projection}
    return Cost(
        params=price.params - patches.params + tables + projection.params,
        macs=macs,
        forward_flops=price.forward_flops + 2 * (projection.macs - patches.macs),
        train_flops=price.train_flops + 6 * projection.macs - 4 * patches.macs,
        parts=parts,
    )


def training_flops(
    shape: ViTConfig | TwoTowerConfig, learned: Collection[str] | None = None, *, cached: bool = False
) -> int:
    """Return the FLOPs of forward and backward pass per image, and of two towers its text.

    `learned` are the names of the parameters that are trained; None means all. Of the others the backward pass computes
    no gradients, and none below the lowest that is trained; elementwise operations are taken to shrink by as much. A
    text tower is counted whole. A cached image tower does not run. The loss itself, a product of the batch with itself,
    is left out.
    """
    if isinstance(shape, ViTConfig):
        whole = cost(shape)
        share = backward_macs(shape, learned) / backward_macs(shape)
        return whole.forward_flops + round(share * (whole.train_flops - whole.forward_flops))
    image = None if learned is None else [name.removeprefix("image.") for name in learned if name.startswith("image.")]
    width = features_dim(shape)
    out_dim = shape.embed_dim or width
    flops = text_cost(shape.text, out_dim).train_flops
    if shape.embed_dim is not None:
        flops += (4 if image == [] else 6) * width * out_dim
    return flops + (0 if cached else training_flops(shape.image, image))
