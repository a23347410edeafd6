"""Images and texts -> unit vectors in one space, where an image lies near its text.

Letters: B images or texts, D width of the image tower, E width of the common space.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from softmoe.models.config import TwoTowerConfig
from softmoe.models.heads import Projection
from softmoe.models.text import TextTransformer
from softmoe.models.vit import VisionTransformer

EPS = 1e-8


class Embeddings(NamedTuple):
    """The vectors and numbers a contrastive loss needs. Logits are image @ text.T * scale + bias."""

    image: Tensor | None
    """(B, E) of length 1"""
    text: Tensor | None
    scale: Tensor
    bias: Tensor | None


class TwoTower(nn.Module):
    """An image tower without a head and a text tower.

    Images may also come as (B, D) features of the image tower: a locked one is then computed once for all of training.
    """

    def __init__(self, config: TwoTowerConfig):
        super().__init__()
        check(config)
        self.config = config
        E = config.embed_dim or features_dim(config)
        self.image = VisionTransformer(config.image)
        self.projection = nn.Identity() if config.embed_dim is None else Projection(features_dim(config), E)
        self.text = TextTransformer(config.text, E)
        self.log_scale = nn.Parameter(torch.empty(()))
        self.bias = None if config.bias_init is None else nn.Parameter(torch.empty(()))
        self.locked = False
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.log_scale, math.log(self.config.scale_init))
        if self.bias is not None:
            nn.init.constant_(self.bias, self.config.bias_init or 0.0)

    def forward(self, images: Tensor | None, tokens_BM: Tensor | None) -> Embeddings:
        """Embed images and texts. Either may be None: then only the other tower runs."""
        image_BE = None if images is None else self.embed_images(images)
        text_BE = None if tokens_BM is None else self.embed_texts(tokens_BM)
        return Embeddings(image_BE, text_BE, self.log_scale.exp(), self.bias)

    def embed_images(self, images: Tensor) -> Tensor:
        """(B, 3, height, width), or (B, D) features -> (B, E) of length 1."""
        features_BD = images if images.ndim == 2 else self.image(images)
        return unit(self.projection(features_BD))

    def embed_texts(self, tokens_BM: Tensor) -> Tensor:
        return unit(self.text(tokens_BM))

    def lock_image_tower(self) -> None:
        """Keep its weights as they are, its dropout and routing noise off."""
        self.locked = True
        self.image.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> "TwoTower":
        super().train(mode)
        if self.locked:
            self.image.eval()
        return self

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.image.set_grad_checkpointing(enable)
        self.text.encoder.checkpoint_blocks = enable


def unit(x_BE: Tensor) -> Tensor:
    """Rows of length 1, in float32 at least: the loss multiplies their differences by the scale."""
    wide_BE = x_BE.to(torch.promote_types(x_BE.dtype, torch.float32))
    return wide_BE / (torch.linalg.vector_norm(wide_BE, dim=-1, keepdim=True) + EPS)


def features_dim(config: TwoTowerConfig) -> int:
    return config.image.representation_size or config.image.width


def check(config: TwoTowerConfig) -> None:
    if config.image.num_classes is not None:
        raise ValueError(f"an image tower has no head, but num_classes is {config.image.num_classes}: set it to None")
    if config.embed_dim is not None and config.embed_dim < 1:
        raise ValueError(f"embed_dim must be at least 1, got {config.embed_dim}")
    if not config.scale_init > 0:
        raise ValueError(f"scale_init must be positive, got {config.scale_init}")
