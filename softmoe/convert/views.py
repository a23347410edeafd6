"""Our parameters in the layout of the reference.

Each of its arrays is a view of one of our parameters: transposed, split by heads, or a third of the packed
query-key-value matrix. Writing into the view writes the parameter, reading it reads it, and the same views of the
gradients are the reference's gradients. Nothing is computed, so both directions are exact.

Letters: D width, A heads, E head width.
"""

from collections.abc import Callable

from torch import Tensor, nn

from softmoe.models import VisionTransformer
from softmoe.models.embed import LearnedPositions
from softmoe.models.heads import AttentionPool
from softmoe.models.transformer import MLP, Attention, Block
from softmoe.moe import Experts, MoE, PlacedRouter, SoftRouter
from softmoe.moe.sparse import SparseRouter

Read = Callable[[Tensor], Tensor]  # what to look at: the values or the gradients
Views = dict[str, Tensor]


def reference_views(module: nn.Module, read: Read) -> Views:
    """Name in the reference -> view, for a VisionTransformer or one MoE layer; `read` must return a tensor as it is."""
    if isinstance(module, VisionTransformer):
        views = vit_views(module, read)
    elif isinstance(module, MoE):
        views = moe_views(module, read)
    else:
        raise ValueError(f"expected a VisionTransformer or an MoE layer, got {type(module).__name__}")
    assert sum(view.numel() for view in views.values()) == sum(p.numel() for p in module.parameters())
    return views


def vit_views(model: VisionTransformer, read: Read) -> Views:
    conv = model.embed.proj
    assert conv.bias is not None
    views = {"embedding/kernel": read(conv.weight).permute(2, 3, 1, 0), "embedding/bias": read(conv.bias)}
    if model.class_token is not None:
        views["cls"] = read(model.class_token)
    if isinstance(model.positions, LearnedPositions):
        views["Encoder/posembed_input/pos_embedding"] = read(model.positions.table)
    for index, block in enumerate(model.encoder.blocks):
        views |= under(f"Encoder/encoderblock_{index}", block_views(block, read))
    views |= under("Encoder/encoder_norm", norm_views(model.encoder.norm, read))
    if isinstance(model.pool, AttentionPool):
        views |= under("MapHead", map_head_views(model.pool, read))
    for name in ("pre_logits", "head"):
        layer = getattr(model, name)
        if isinstance(layer, nn.Linear):
            views |= under(name, linear_views(layer, read))
    return views


def block_views(block: nn.Module, read: Read) -> Views:
    assert isinstance(block, Block)
    assert isinstance(block.attention, Attention)
    views = under("LayerNorm_0", norm_views(block.norm1, read))
    views |= under("SelfAttention", attention_views(block.attention, read))
    views |= under("LayerNorm_1", norm_views(block.norm2, read))
    if isinstance(block.mlp, MoE):
        return views | under("Moe", moe_views(block.mlp, read))
    assert isinstance(block.mlp, MLP)
    return views | under("Mlp", mlp_views(block.mlp, read))


def map_head_views(pool: AttentionPool, read: Read) -> Views:
    views = {"probe": read(pool.probe)}
    views |= under("MultiHeadDotProductAttention", attention_views(pool.attention, read))
    views |= under("LayerNorm", norm_views(pool.norm, read))
    return views | under("Mlp", mlp_views(pool.mlp, read))


def attention_views(attention: Attention, read: Read) -> Views:
    """Query, key and value apart, with the heads as an axis: kernels (D, A, E), biases (A, E), output (A, E, D)."""
    views: Views = {}
    heads = (attention.heads, -1)
    weights, biases = read(attention.qkv.weight).chunk(3), read(attention.qkv.bias).chunk(3)
    for name, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
        views[f"{name}/kernel"] = weight.T.unflatten(1, heads)
        views[f"{name}/bias"] = bias.unflatten(0, heads)
    views["out/kernel"] = read(attention.out.weight).T.unflatten(0, heads)
    views["out/bias"] = read(attention.out.bias)
    for name, norm in (("query_ln", attention.query_norm), ("key_ln", attention.key_norm)):
        if isinstance(norm, nn.LayerNorm):
            views |= under(name, norm_views(norm, read))
    return views


def moe_views(layer: MoE, read: Read) -> Views:
    experts, router = layer.experts, layer.router
    if not isinstance(experts, Experts):
        raise ValueError(f"expected an MoE layer with Experts inside, got {type(experts).__name__}")
    views = {
        "Mlp/Dense_0/kernel": read(experts.w1),
        "Mlp/Dense_0/bias": read(experts.b1),
        "Mlp/Dense_1/kernel": read(experts.w2).transpose(1, 2),
        "Mlp/Dense_1/bias": read(experts.b2),
    }
    if isinstance(router, PlacedRouter):
        raise ValueError("the paper's code has no router with a place, so these weights cannot be written for it")
    if isinstance(router, SoftRouter):
        views["Router/mu"] = read(router.phi)
        if router.scale is not None:
            views["Router/scale"] = read(router.scale)
    elif isinstance(router, SparseRouter):
        views["Router/dense/kernel"] = read(router.weight)
    return views


def mlp_views(mlp: MLP, read: Read) -> Views:
    return under("Dense_0", linear_views(mlp.fc1, read)) | under("Dense_1", linear_views(mlp.fc2, read))


def linear_views(linear: nn.Linear, read: Read) -> Views:
    return {"kernel": read(linear.weight).T, "bias": read(linear.bias)}


def norm_views(norm: nn.LayerNorm, read: Read) -> Views:
    views = {"scale": read(norm.weight)}
    return views if norm.bias is None else views | {"bias": read(norm.bias)}


def under(parent: str, views: Views) -> Views:
    return {f"{parent}/{name}": view for name, view in views.items()}
