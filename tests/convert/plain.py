"""A plain vision transformer of torch's own modules, and its weights under other people's names."""

import numpy as np
import torch
from torch import Tensor, nn


class PlainBlock(nn.Module):
    def __init__(self, dim: int, heads: int, hidden: int, gelu: str):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(gelu), nn.Linear(hidden, dim))
        self.gamma1 = self.gamma2 = 1.0  # layer scales

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        x = x + self.gamma1 * self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.gamma2 * self.mlp(self.norm2(x))


class PlainViT(nn.Module):
    """pool: class, mean or attention. `class_position=False` gives the class token no position."""

    def __init__(
        self,
        pool: str = "class",
        gelu: str = "tanh",
        grid: tuple[int, int] = (3, 3),
        representation: int | None = None,
        class_position: bool = True,
        dim: int = 16,
        heads: int = 2,
        hidden: int = 24,
        patch: int = 4,
        depth: int = 2,
        classes: int = 5,
    ):
        super().__init__()
        self.heads, self.pool_kind, self.grid = heads, pool, grid
        self.patches = nn.Conv2d(3, dim, patch, patch)
        self.token = nn.Parameter(torch.empty(1, 1, dim)) if pool == "class" else None
        rows = grid[0] * grid[1] + (pool == "class" and class_position)
        self.positions = nn.Parameter(torch.empty(1, rows, dim))
        self.blocks = nn.ModuleList(PlainBlock(dim, heads, hidden, gelu) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        if pool == "attention":
            self.probe = nn.Parameter(torch.empty(1, 1, dim))
            self.pool = PlainBlock(dim, heads, hidden, gelu)
        self.pre_logits = None if representation is None else nn.Linear(dim, representation)
        self.head = nn.Linear(representation or dim, classes)
        for parameter in self.parameters():  # nothing zero, nothing one
            nn.init.normal_(parameter, std=0.3)
        self.double()

    @property
    def image_size(self) -> tuple[int, int]:
        side = self.patches.kernel_size[0]
        return self.grid[0] * side, self.grid[1] * side

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        if self.token is None:
            x = x + self.positions
        else:
            token = self.token.expand(len(x), -1, -1)
            late = self.positions.shape[1] == x.shape[1]
            x = torch.cat([token, x + self.positions], 1) if late else torch.cat([token, x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if self.pool_kind == "attention":
            pooled = self.pool.attention(self.probe.expand(len(x), -1, -1), x, x, need_weights=False)[0]
            vector = (pooled + self.pool.mlp(self.pool.norm2(pooled)))[:, 0]
        else:
            vector = x[:, 0] if self.pool_kind == "class" else x.mean(1)
        return self.head(vector if self.pre_logits is None else self.pre_logits(vector).tanh())


Arrays = dict[str, np.ndarray]


def array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().numpy()


def flax_dense(linear: nn.Module) -> Arrays:
    assert isinstance(linear, nn.Linear)
    return {"kernel": array(linear.weight).T, "bias": array(linear.bias)}


def flax_norm(norm: nn.LayerNorm) -> Arrays:
    return {"scale": array(norm.weight), "bias": array(norm.bias)}


def flax_attention(attention: nn.MultiheadAttention) -> Arrays:
    heads, dim = attention.num_heads, attention.embed_dim
    arrays: Arrays = {}
    for index, name in enumerate(("query", "key", "value")):
        rows = slice(index * dim, (index + 1) * dim)
        arrays[f"{name}/kernel"] = array(attention.in_proj_weight[rows]).T.reshape(dim, heads, -1)
        arrays[f"{name}/bias"] = array(attention.in_proj_bias[rows]).reshape(heads, -1)
    arrays["out/kernel"] = array(attention.out_proj.weight).T.reshape(heads, -1, dim)
    return arrays | {"out/bias": array(attention.out_proj.bias)}


def put(name: str, arrays: Arrays) -> Arrays:
    return {f"{name}/{key}": value for key, value in arrays.items()}


def flax_block(block: PlainBlock, counters: tuple[int, int, int, int]) -> Arrays:
    norm1, attention, norm2, mlp = counters
    arrays = put(f"LayerNorm_{norm1}", flax_norm(block.norm1))
    arrays |= put(f"MultiHeadDotProductAttention_{attention}", flax_attention(block.attention))
    arrays |= put(f"LayerNorm_{norm2}", flax_norm(block.norm2))
    return arrays | flax_mlp(f"MlpBlock_{mlp}", block)


def flax_mlp(name: str, block: PlainBlock) -> Arrays:
    return put(f"{name}/Dense_0", flax_dense(block.mlp[0])) | put(f"{name}/Dense_1", flax_dense(block.mlp[2]))


RAW, RENUMBERED = (0, 1, 2, 3), (0, 0, 1, 0)


def flax_names(
    model: PlainViT,
    counters: tuple[int, int, int, int] = RAW,
    positions: str = "Transformer/posembed_input/pos_embedding",
) -> Arrays:
    """As the original ViT's files, or with `positions="pos_embedding"` and RENUMBERED as big_vision's."""
    arrays = {
        "embedding/kernel": array(model.patches.weight).transpose(2, 3, 1, 0),
        "embedding/bias": array(model.patches.bias),
        positions: array(model.positions),
    }
    if model.token is not None:
        arrays["cls"] = array(model.token)
    for index, block in enumerate(model.blocks):
        arrays |= put(f"Transformer/encoderblock_{index}", flax_block(block, counters))
    arrays |= put("Transformer/encoder_norm", flax_norm(model.norm))
    if model.pool_kind == "attention":
        arrays["MAPHead_0/probe"] = array(model.probe)
        arrays |= put("MAPHead_0/MultiHeadDotProductAttention_0", flax_attention(model.pool.attention))
        arrays |= put("MAPHead_0/LayerNorm_0", flax_norm(model.pool.norm2)) | flax_mlp(
            "MAPHead_0/MlpBlock_0", model.pool
        )
    if model.pre_logits is not None:
        arrays |= put("pre_logits", flax_dense(model.pre_logits))
    return arrays | put("head", flax_dense(model.head))


def timm_names(model: PlainViT) -> dict[str, Tensor]:
    state = put_dots("patch_embed.proj", model.patches) | {"pos_embed": model.positions}
    if model.token is not None:
        state["cls_token"] = model.token
    for index, block in enumerate(model.blocks):
        name = f"blocks.{index}"
        state |= put_dots(f"{name}.norm1", block.norm1) | put_dots(f"{name}.norm2", block.norm2)
        state[f"{name}.attn.qkv.weight"] = block.attention.in_proj_weight
        state[f"{name}.attn.qkv.bias"] = block.attention.in_proj_bias
        state |= put_dots(f"{name}.attn.proj", block.attention.out_proj)
        state |= put_dots(f"{name}.mlp.fc1", block.mlp[0]) | put_dots(f"{name}.mlp.fc2", block.mlp[2])
        for number, gamma in ((1, block.gamma1), (2, block.gamma2)):
            if isinstance(gamma, Tensor):
                state[f"{name}.ls{number}.gamma"] = gamma
    state |= put_dots("norm", model.norm) | put_dots("head", model.head)
    if model.pool_kind == "attention":
        pool, dim = model.pool, model.norm.normalized_shape[0]
        state["attn_pool.latent"] = model.probe
        state["attn_pool.q.weight"], state["attn_pool.kv.weight"] = pool.attention.in_proj_weight.split([dim, 2 * dim])
        state["attn_pool.q.bias"], state["attn_pool.kv.bias"] = pool.attention.in_proj_bias.split([dim, 2 * dim])
        state |= put_dots("attn_pool.proj", pool.attention.out_proj) | put_dots("attn_pool.norm", pool.norm2)
        state |= put_dots("attn_pool.mlp.fc1", pool.mlp[0]) | put_dots("attn_pool.mlp.fc2", pool.mlp[2])
    if model.pre_logits is not None:
        state |= put_dots("pre_logits.fc", model.pre_logits)
    return {name: value.detach() for name, value in state.items()}


def put_dots(name: str, module: nn.Module) -> dict[str, Tensor]:
    return {f"{name}.weight": module.weight, f"{name}.bias": module.bias}  # type: ignore[dict-item]
