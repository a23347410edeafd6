"""Images -> tokens -> blocks -> vector -> logits.

Letters: B images, M tokens, D width.
"""

import torch
from torch import Tensor, nn

from softmoe.models.config import TextConfig, ViTConfig
from softmoe.models.embed import LearnedPositions, PatchEmbed, SinCosPositions
from softmoe.models.heads import AttentionPool, FirstPool, Head, LastPool, MeanPool, PreLogits
from softmoe.models.transformer import MLP, Encoder
from softmoe.moe.experts import ACTIVATIONS


class VisionTransformer(nn.Module):
    """(B, 3, height, width) in [-1, 1] -> (B, classes) logits, or (B, D) features without a head.

    Any image size of at least one patch works: positions are resampled, slots stay as they are.
    """

    def __init__(self, config: ViTConfig):
        super().__init__()
        check(config)
        self.config = config
        D = config.width
        prefix = int(config.pool == "class")
        self.embed = PatchEmbed(config.patch_size, D)
        grid = self.embed.grid(*config.image_shape)
        self.class_token = nn.Parameter(torch.zeros(1, 1, D)) if prefix else None
        kinds = {"learned": LearnedPositions, "sincos": SinCosPositions}
        self.positions = None if config.positions == "none" else kinds[config.positions](grid, D, prefix)
        self.encoder = make_encoder(config)
        self.pool = make_pool(config)
        features = config.representation_size or D
        self.pre_logits = PreLogits(D, features) if config.representation_size else nn.Identity()
        self.head = nn.Identity() if config.num_classes is None else Head(features, config.num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(images))

    def forward_features(self, images: Tensor) -> Tensor:
        """(B, 3, height, width) -> (B, M, D): the tokens after the last norm, a class token first if there is one."""
        if images.ndim != 4 or images.shape[1] != 3:
            raise ValueError(f"expected images of shape (batch, 3, height, width), got {tuple(images.shape)}")
        grid = self.embed.grid(images.shape[2], images.shape[3])
        x_BMD = self.embed(images)
        if self.class_token is not None:
            x_BMD = torch.cat([self.class_token.expand(x_BMD.shape[0], -1, -1), x_BMD], dim=1)
        if self.positions is not None:
            x_BMD = x_BMD + self.positions(grid)
        return self.encoder(x_BMD, grid=grid)

    def forward_head(self, x_BMD: Tensor, *, pre_logits: bool = False) -> Tensor:
        """Tokens -> logits, or with `pre_logits` the vector the head would see (what few-shot evaluation uses)."""
        vector_BD = self.pre_logits(self.pool(x_BMD))
        return vector_BD if pre_logits else self.head(vector_BD)

    def set_gradient_checkpointing(self, enabled: bool = True) -> None:
        """Keep only the input of each block and compute its inside again in the backward pass."""
        self.encoder.checkpoint_blocks = enabled


def make_encoder(config: ViTConfig | TextConfig) -> Encoder:
    """The blocks of a tower, with experts in the MLP's place where the settings say so."""
    c = config

    def make_mlp() -> MLP:
        return MLP(c.width, c.mlp_dim, dropout=c.dropout, activation=c.activation)

    def make_layer(index: int) -> nn.Module:
        if c.moe and index in c.moe_blocks:
            kept = make_mlp() if c.moe.keep_mlp else None
            return c.moe.make_layer(c.width, c.mlp_dim, c.dropout, c.activation, kept=kept)
        return make_mlp()

    options = {"qk_norm": c.qk_norm, "dropout": c.dropout, "attention_dropout": c.attention_dropout}
    return Encoder(c.width, c.depth, c.heads, make_layer, **options)


def make_pool(config: ViTConfig | TextConfig) -> nn.Module:
    c = config
    if c.pool == "attention":
        return AttentionPool(c.width, c.heads, c.mlp_dim, qk_norm=c.qk_norm, activation=c.activation)
    return {"mean": MeanPool, "class": FirstPool, "last": LastPool}[c.pool]()


def check(config: ViTConfig) -> None:
    if not isinstance(config.image_size, int) and len(config.image_size) != 2:
        raise ValueError(f"image_size must be one number or (height, width), got {config.image_size}")
    for name in ("patch_size", "width", "depth", "mlp_dim", "heads"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(config, name)}")
    if config.num_classes is not None and config.num_classes < 1:
        raise ValueError(f"num_classes must be at least 1, or None for no head, got {config.num_classes}")
    for name, allowed in {
        "pool": ("mean", "class", "attention"),
        "positions": ("learned", "sincos", "none"),
        "activation": tuple(ACTIVATIONS),
    }.items():
        if getattr(config, name) not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(config, name)!r}")
