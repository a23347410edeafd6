"""The two-tower model: images and texts become unit vectors in one space, where an image is near its text.

Letters: B images or texts, M tokens, D width of a tower, E width of the common space.
"""

import math
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from softmoe.models.config import TextConfig, TwoTowerConfig
from softmoe.models.conventions import HubInterface, public, undecayed
from softmoe.models.heads import Projection
from softmoe.models.vit import VisionTransformer, make_encoder, make_pool
from softmoe.moe.experts import ACTIVATIONS, normal_
from softmoe.moe.routing import routing_dtype

TEXT_POOLS = ("last", "mean", "class", "attention")
EPS = 1e-8


class TextTransformer(nn.Module):
    """The text tower, (B, M) token numbers -> (B, E), with M at most `length`. Every token attends to all others.

    With `mask_padding` everything after the first end token is masked, so the amount of padding does not matter.
    Without it padding is read like text, as in the paper's code, and all texts should have the same length.
    """

    def __init__(self, config: TextConfig, out_dim: int):
        super().__init__()
        check_text(config)
        self.config = config
        D = config.width
        self.embed = TokenEmbed(config.vocab_size, D)
        self.class_token = nn.Parameter(torch.empty(1, 1, D)) if config.pool == "class" else None
        self.positions = TextPositions(config.tokens, D)
        self.encoder = make_encoder(config)
        self.pool = make_pool(config)
        self.projection = Projection(D, out_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.class_token is not None:
            nn.init.zeros_(self.class_token)

    def forward(self, tokens_BM: Tensor) -> Tensor:
        self.check_tokens(tokens_BM)
        mask_BM = real_tokens(tokens_BM, self.config.end_token) if self.config.mask_padding else None
        x_BMD = self.embed(tokens_BM)
        if self.class_token is not None:
            x_BMD = torch.cat([self.class_token.expand(x_BMD.shape[0], -1, -1), x_BMD], dim=1)
            if mask_BM is not None:
                mask_BM = torch.cat([torch.ones_like(mask_BM[:, :1]), mask_BM], dim=1)
        encoded_BMD = self.encoder(self.positions(x_BMD), mask_BM)
        return self.projection(self.pool(encoded_BMD, mask_BM))

    def check_tokens(self, tokens_BM: Tensor) -> None:
        length = self.config.length
        if tokens_BM.ndim != 2 or not 1 <= tokens_BM.shape[1] <= length or tokens_BM.is_floating_point():
            shape = tuple(tokens_BM.shape)
            raise ValueError(f"expected token numbers of shape (batch, 1 to {length}), got {tokens_BM.dtype} {shape}")


class TokenEmbed(nn.Embedding):
    """A learned vector per token, drawn with a length of about 1."""

    def reset_parameters(self) -> None:
        normal_(self.weight, std=self.embedding_dim**-0.5)


class TextPositions(nn.Module):
    """Adds a learned vector per position; shorter texts use the first ones."""

    def __init__(self, length: int, dim: int):
        super().__init__()
        self.table = nn.Parameter(torch.empty(1, length, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        normal_(self.table, std=0.02)

    def forward(self, x_BMD: Tensor) -> Tensor:
        return x_BMD + self.table[:, : x_BMD.shape[1]]


def real_tokens(tokens_BM: Tensor, end_token: int) -> Tensor:
    """Return a mask that is True up to and including the first end token, which also truncated texts have."""
    end_BM = tokens_BM == end_token
    return end_BM.cumsum(1) - end_BM.long() == 0


def check_text(config: TextConfig) -> None:
    for name in ("vocab_size", "length", "width", "depth", "mlp_dim", "heads"):
        if getattr(config, name) < 1:
            raise ValueError(f"text {name} must be at least 1, got {getattr(config, name)}")
    if not 0 <= config.end_token < config.vocab_size:
        raise ValueError(f"the end token must be one of the {config.vocab_size} tokens, got {config.end_token}")
    for name, allowed in {"pool": TEXT_POOLS, "activation": tuple(ACTIVATIONS)}.items():
        if getattr(config, name) not in allowed:
            raise ValueError(f"text {name} must be one of {', '.join(allowed)}, got {getattr(config, name)!r}")


class Embeddings(NamedTuple):
    """The inputs of a contrastive loss, whose logits are image @ text.T * scale + bias."""

    image: Tensor | None
    """(B, E), rows of length 1; None if no images were given."""
    text: Tensor | None
    """(B, E), rows of length 1; None if no texts were given."""
    scale: Tensor
    """The learned factor of the cosines, one number."""
    bias: Tensor | None
    """The learned bias of the logits, one number; None in a model without one."""


class TwoTower(HubInterface):
    """An image tower without a head, and a text tower.

    Images may also be given as (B, D) features of the image tower, which need computing only once if it is locked. It
    is saved with its tokenizer: `save_pretrained(folder, tokenizer=...)`, `push_to_hub(name, tokenizer=...)`.
    """

    def __init__(self, config: TwoTowerConfig):
        super().__init__()
        check_towers(config)
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
        """Embed images and texts. If one of them is None, only the other tower runs."""
        image_BE = None if images is None else self.embed_images(images)
        text_BE = None if tokens_BM is None else self.embed_texts(tokens_BM)
        return Embeddings(image_BE, text_BE, self.log_scale.exp(), self.bias)

    def embed_images(self, images: Tensor) -> Tensor:
        """Return unit vectors (B, E) of images (B, 3, height, width) or features (B, D)."""
        features_BD = images if images.ndim == 2 else self.image(images)
        return unit(self.projection(features_BD))

    def embed_texts(self, tokens_BM: Tensor) -> Tensor:
        return unit(self.text(tokens_BM))

    def lock_image_tower(self) -> None:
        """Freeze the image tower and keep it in evaluation mode."""
        self.locked = True
        self.image.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> "TwoTower":
        super().train(mode)
        if self.locked:
            self.image.eval()
        return self

    @classmethod
    def from_pretrained(cls, where: Any, *arguments: Any, revision: str | None = None, **options: Any) -> Self:
        """Load both towers from a folder, a run or the Hub; `softmoe.from_pretrained` loads the image tower alone."""
        storage = public("storage")
        saved = storage.open_saved(where if revision is None else storage.hub.download(str(where), revision))
        return storage.load_two_tower(saved, *arguments, **options).eval()

    def no_weight_decay(self) -> set[str]:
        return undecayed(self)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.image.set_grad_checkpointing(enable)
        self.text.encoder.recomputed = range(len(self.text.encoder.blocks) if enable else 0)


def unit(x_BE: Tensor) -> Tensor:
    """Normalize rows, in float32 at least, since the loss multiplies their differences by the scale."""
    wide_BE = x_BE.to(routing_dtype(x_BE.dtype))
    return wide_BE / (torch.linalg.vector_norm(wide_BE, dim=-1, keepdim=True) + EPS)


def features_dim(config: TwoTowerConfig) -> int:
    return config.image.head_width


def check_towers(config: TwoTowerConfig) -> None:
    if config.image.num_classes is not None:
        raise ValueError(f"an image tower has no head, but num_classes is {config.image.num_classes}: set it to None")
    if config.embed_dim is not None and config.embed_dim < 1:
        raise ValueError(f"embed_dim must be at least 1, got {config.embed_dim}")
    if not config.scale_init > 0:
        raise ValueError(f"scale_init must be positive, got {config.scale_init}")
