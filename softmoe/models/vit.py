"""The vision transformer: images -> tokens -> blocks -> vector -> logits.

Letters: B images, M tokens, D width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from softmoe.models.config import TextConfig, ViTConfig
from softmoe.models.conventions import HubInterface, TimmInterface
from softmoe.models.embed import LearnedPositions, PatchEmbed, SinCosPositions
from softmoe.models.heads import AttentionPool, FirstPool, Head, LastPool, MeanPool, PreLogits
from softmoe.models.transformer import MLP, Encoder, PatchMerger
from softmoe.moe.experts import ACTIVATIONS, normal_


class VisionTransformer(TimmInterface, HubInterface):
    """A vision transformer, (B, 3, height, width) in [-1, 1] -> (B, classes) logits, or features without a head.

    Any image size of at least one patch works: positions are resampled, slots stay the same.
    """

    def __init__(self, config: ViTConfig):
        super().__init__()
        check_vit(config)
        self.config = config
        D = config.width
        self.embed = PatchEmbed(config.patch_size, D)
        grid = self.embed.grid(*config.image_shape)
        self.class_token = nn.Parameter(torch.empty(1, 1, D)) if config.pool == "class" else None
        self.registers = nn.Parameter(torch.empty(1, config.registers, D)) if config.registers else None
        kinds = {"learned": LearnedPositions, "sincos": SinCosPositions}
        self.positions = None if config.positions == "none" else kinds[config.positions](grid, D, config.prefix)
        self.pre_norm = nn.LayerNorm(D, eps=config.norm_eps) if config.pre_norm else nn.Identity()
        self.encoder = make_encoder(config)
        self.pool = make_pool(config)
        self.pool_norm = nn.LayerNorm(D, eps=config.norm_eps) if config.pool_norm else nn.Identity()
        hidden = config.representation_size
        self.pre_logits = PreLogits(config.pooled_width, hidden) if hidden else nn.Identity()
        self.head_dropout = nn.Dropout(config.head_dropout)
        self.head = nn.Identity() if config.num_classes is None else Head(config.head_width, config.num_classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the parameters that belong to no part of the model; each part resets its own."""
        if self.class_token is not None:
            nn.init.zeros_(self.class_token)
        if self.registers is not None:
            normal_(self.registers, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.head_dropout(self.forward_vector(images)))

    def forward_vector(self, images: Tensor) -> Tensor:
        """Return the vector that the head gets, (B, head_width), which few-shot evaluation uses.

        It is the pooled vector, followed by what `head_blocks` add: of each the class token, if there is one, and the
        mean of the cells, all tokens normalized.
        """
        x_BMD, grid = self.embed_images(images)
        last_BMD, outputs = self.encoder.forward_blocks(x_BMD, grid=grid, taken=self.config.head_blocks)
        parts = [self.pooled(self.encoder.norm(last_BMD))]
        for output_BMD in outputs:
            tokens_BMD = F.layer_norm(output_BMD, (self.config.width,), eps=self.config.norm_eps)
            parts += [tokens_BMD[:, 0]] if self.class_token is not None else []
            parts += [tokens_BMD[:, self.config.prefix :].mean(1)]
        return torch.cat(parts, 1) if outputs else parts[0]

    def forward_features(self, images: Tensor) -> Tensor:
        """Return the tokens after the last norm, (B, M, D); class token and registers come first."""
        x_BMD, grid = self.embed_images(images)
        return self.encoder(x_BMD, grid=grid)

    def embed_images(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Return the tokens before the first block, (B, M, D), and the (rows, columns) of the patches."""
        if images.ndim != 4 or images.shape[1] != 3:
            raise ValueError(f"expected images of shape (batch, 3, height, width), got {tuple(images.shape)}")
        if not images.is_floating_point():
            raise ValueError(f"expected images as real numbers from -1 to 1, got {images.dtype}: images / 127.5 - 1")
        grid = self.embed.grid(images.shape[2], images.shape[3])
        x_BMD = self.embed(images)
        prefix = [token for token in (self.class_token, self.registers) if token is not None]
        if prefix:
            x_BMD = torch.cat([*(token.expand(x_BMD.shape[0], -1, -1) for token in prefix), x_BMD], dim=1)
        if self.positions is not None:
            x_BMD = x_BMD + self.positions(grid)
        return self.pre_norm(x_BMD), grid

    def forward_head(self, x_BMD: Tensor, pre_logits: bool = False) -> Tensor:
        """Return logits, or with `pre_logits` the pooled vector."""
        if self.config.head_blocks and not pre_logits:
            raise ValueError("the head of this model sees several blocks, not the last alone: call the model itself")
        vector_BD = self.pooled(x_BMD)
        return vector_BD if pre_logits else self.head(self.head_dropout(vector_BD))

    def pooled(self, x_BMD: Tensor) -> Tensor:
        """Return one vector for the tokens of each image."""
        seen_BMD = x_BMD if self.registers is None or self.class_token is not None else x_BMD[:, self.config.prefix :]
        return self.pre_logits(self.pool_norm(self.pool(seen_BMD)))


def make_encoder(config: ViTConfig | TextConfig) -> Encoder:
    """Build the blocks of a tower, with an MoE in the blocks that the config names."""
    c = config
    if c.moe and c.moe.slots_stay and not isinstance(c, ViTConfig):
        raise ValueError("slots_stay is for images: the tokens of a text have an order and an end, slots have none")

    def make_mlp(hidden: int) -> MLP:
        return MLP(c.width, hidden, dropout=c.dropout, activation=c.activation)

    def make_layer(index: int) -> nn.Module:
        if c.moe and index in c.moe_blocks:
            kept = make_mlp(c.moe.kept_width(c.mlp_dim)) if c.moe.keep_mlp else None
            on_slots = c.moe.slots_stay and index > min(c.moe_blocks)
            return c.moe.make_layer(c.width, c.mlp_dim, c.dropout, c.activation, kept=kept, on_slots=on_slots)
        return make_mlp(c.mlp_dim)

    options: dict[str, Any] = {"qk_norm": c.qk_norm, "dropout": c.dropout, "attention_dropout": c.attention_dropout}
    if isinstance(c, ViTConfig):
        options |= {"norm_eps": c.norm_eps, "layer_scale": c.layer_scale, "last_norm": not c.pool_norm}
        options["drop_path"] = c.drop_path
        if c.merge is not None:
            options["merger"] = c.merge[0], PatchMerger(c.width, c.merge[1], c.prefix, c.norm_eps)
    return Encoder(c.width, c.depth, c.heads, make_layer, **options)


def make_pool(config: ViTConfig | TextConfig) -> nn.Module:
    c = config
    if c.pool == "attention":
        eps = {"norm_eps": c.norm_eps} if isinstance(c, ViTConfig) else {}
        return AttentionPool(c.width, c.heads, c.mlp_dim, qk_norm=c.qk_norm, activation=c.activation, **eps)
    return {"mean": MeanPool, "class": FirstPool, "last": LastPool, "concat": nn.Flatten}[c.pool]()


def check_vit(config: ViTConfig) -> None:
    if not isinstance(config.image_size, int) and len(config.image_size) != 2:
        raise ValueError(f"image_size must be one number or (height, width), got {config.image_size}")
    for name in ("patch_size", "width", "depth", "mlp_dim", "heads"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(config, name)}")
    if config.registers < 0 or not 0 < config.norm_eps < 1:
        raise ValueError(
            f"registers are 0 or more and norm_eps is from 0 to 1, got {config.registers} and {config.norm_eps}"
        )
    if config.num_classes is not None and config.num_classes < 1:
        raise ValueError(f"num_classes must be at least 1, or None for no head, got {config.num_classes}")
    if config.merge is not None:
        check_merge(config, *config.merge)
    if config.moe and config.moe.slots_stay and config.prefix:
        raise ValueError(
            "with slots_stay nothing but slots goes on: take pool mean, attention or concat, and no registers"
        )
    if config.pool == "concat" and (config.last_map is None or config.pool_norm):
        raise ValueError(
            "pool concat needs a number of tokens that no image size changes, so slots_stay or merge, and their norm "
            "before it: take another pool, or leave out pool_norm"
        )
    if list(config.head_blocks) != sorted({block for block in config.head_blocks if 0 <= block < config.depth}):
        raise ValueError(
            f"head_blocks are blocks from 0 to {config.depth - 1} in rising order, got {list(config.head_blocks)}"
        )
    for name, allowed in {
        "pool": ("mean", "class", "attention", "concat"),
        "positions": ("learned", "sincos", "none"),
        "activation": tuple(ACTIVATIONS),
    }.items():
        if getattr(config, name) not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(config, name)!r}")


def check_merge(config: ViTConfig, block: int, tokens: int) -> None:
    if config.moe_blocks:
        raise ValueError("merge is for models without experts: leave it out, or take the router dense")
    if not 0 <= block < config.depth or tokens < 1:
        raise ValueError(
            f"merge is a block from 0 to {config.depth - 1} and the tokens after it, 1 at least, got {block}, {tokens}"
        )
