"""The settings of a text tower."""

from dataclasses import dataclass
from typing import Literal

from softmoe.models import MoEConfig, TextConfig, TwoTowerConfig, ViTConfig
from softmoe.models.variants import SIZES


@dataclass(frozen=True)
class TextSection:
    """A text tower beside the image tower: the model then learns which caption belongs to which image."""

    size: Literal["ti", "s", "b", "l", "h", "g", "G"] | None = None
    """Size of the text tower, by the letters of the image towers; None is no text tower."""
    tokenizer: str | None = None
    """A tokenizer file, .json (tokenizers) or .model (SentencePiece); None learns one from the training captions."""
    vocab_size: int = 8192
    """Tokens to learn, where there is no tokenizer file."""
    lower: bool = True
    """Put texts in lower case."""
    length: int = 16
    """Tokens of a text; longer ones are cut, the end token stays."""
    width: int | None = None
    depth: int | None = None
    mlp_dim: int | None = None
    heads: int | None = None
    pool: Literal["last", "mean", "class", "attention"] = "last"
    mask_padding: bool = False
    """Hide what follows the end of a text. The paper's code does not."""
    num_experts: int | None = None
    """Soft MoE in the second half of the text tower; give mask_padding too, or slots are filled with padding."""
    slots_per_expert: int = 1
    embed_dim: int | None = None
    """Width of the common space, with a projection of the images too; None is the image tower's own."""
    scale_init: float = 10.0
    """First factor of the cosines between images and texts."""
    bias_init: float | None = -10.0
    """First number added to the logits of the sigmoid loss; None is none."""

    def resolve(self, image: ViTConfig, vocab_size: int, end_token: int = 1) -> TwoTowerConfig:
        assert self.size is not None
        width, depth, mlp_dim, heads = SIZES[self.size]
        moe = None
        if self.num_experts is not None:
            moe = MoEConfig.of("soft", self.num_experts, slots_per_expert=self.slots_per_expert)
        text = TextConfig(
            vocab_size=vocab_size,
            length=self.length,
            end_token=end_token,
            width=self.width or width,
            depth=self.depth or depth,
            mlp_dim=self.mlp_dim or mlp_dim,
            heads=self.heads or heads,
            pool=self.pool,
            mask_padding=self.mask_padding,
            moe=moe,
        )
        return TwoTowerConfig(image, text, self.embed_dim, self.scale_init, self.bias_init)
