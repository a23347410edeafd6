"""Compute what two towers cost from the formulas for one."""

from softmoe.budget.count import Cost, cost
from softmoe.budget.parts import Part
from softmoe.models import TextConfig, TwoTowerConfig, ViTConfig
from softmoe.models.two_tower import features_dim


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
