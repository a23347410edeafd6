"""Count parameters, multiply-accumulates and FLOPs of any model or pair of towers, per image, without building it."""

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from softmoe.budget.elementwise import FORWARD, TRAIN, elementwise
from softmoe.budget.parts import Part, checked, macs_without_gradient, parts
from softmoe.models import TextConfig, TwoTowerConfig, VisionTransformer, ViTConfig, model_config
from softmoe.models.registry import override
from softmoe.models.two_tower import features_dim

Convention = Literal["ours", "paper"]


@dataclass(frozen=True)
class Cost:
    """The cost of a model, per image.

    params          all parameters
    macs            multiply-accumulates of the forward pass, in matrix products and convolutions
    forward_flops   2 per multiply-accumulate, and 1 per elementwise operation
    train_flops     the same, forward and backward; the optimizer is not in it
    parts           name -> (params, macs); they sum to the totals
    """

    params: int
    macs: int
    forward_flops: int
    train_flops: int
    parts: dict[str, Part]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"parts": {name: part._asdict() for name, part in self.parts.items()}}


def cost(model: VisionTransformer | ViTConfig | str, *, convention: Convention = "ours", **overrides: Any) -> Cost:
    """Return what a model, its configuration or its name costs; `overrides` are those of `create_model`.

    Sparse routers of this package move rows by index. `convention="paper"` counts the one-hot products of the paper's
    dispatcher instead, which its tables include; nothing else changes. Where a routing group spans images, a row of
    it is shared out among them, as in a batch of whole groups.
    """
    if convention not in get_args(Convention):
        raise ValueError(f"convention must be 'ours' or 'paper', got {convention!r}")
    config = checked(as_config(model, overrides))
    one_hot = convention == "paper"
    by_part = parts(config, one_hot=one_hot)
    macs = sum(part.macs for part in by_part.values())
    spared = round(macs_without_gradient(config, one_hot=one_hot))
    return Cost(
        params=sum(part.params for part in by_part.values()),
        macs=macs,
        forward_flops=2 * macs + elementwise(config, FORWARD, one_hot=one_hot),
        train_flops=6 * macs - 2 * spared + elementwise(config, TRAIN, one_hot=one_hot),
        parts=by_part,
    )


def as_config(model: VisionTransformer | ViTConfig | str, overrides: dict[str, Any]) -> ViTConfig:
    if isinstance(model, str):
        return model_config(model, **overrides)
    config = model.config if isinstance(model, VisionTransformer) else model
    if not isinstance(config, ViTConfig):
        raise ValueError(f"expected a model, its configuration or its name, got {type(model).__name__}")
    return override(config, overrides)


def text_cost(config: TextConfig, out_dim: int) -> Cost:
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
    price = cost(twin)
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


def training_flops(shape: ViTConfig | TwoTowerConfig, *, locked: bool = False, cached: bool = False) -> int:
    """Return the FLOPs per image, and of two towers its text.

    A locked image tower has no backward pass; a cached one does not run. The loss itself, a product of the batch with
    itself, is left out.
    """
    if isinstance(shape, ViTConfig):
        return cost(shape).train_flops
    image, width = cost(shape.image), features_dim(shape)
    out_dim = shape.embed_dim or width
    flops = text_cost(shape.text, out_dim).train_flops
    if shape.embed_dim is not None:
        flops += 6 * width * out_dim
    return flops + (0 if cached else image.forward_flops if locked else image.train_flops)
