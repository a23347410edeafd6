"""Token numbers -> vectors -> blocks -> one vector.

Letters: B texts, M tokens, D width, E width of the common space.
"""

import torch
from torch import Tensor, nn

from softmoe.models.config import TextConfig
from softmoe.models.heads import Projection
from softmoe.models.vit import make_encoder, make_pool
from softmoe.moe.experts import ACTIVATIONS, normal_

POOLS = ("last", "mean", "class", "attention")


class TextTransformer(nn.Module):
    """(B, M) token numbers, M at most `length` -> (B, E). Not causal: every token sees all.

    With `mask_padding` what follows the first end token is hidden, so more or less of it changes nothing; without,
    padding is read like text, as in the paper's code, and all texts should be as long.
    """

    def __init__(self, config: TextConfig, out_dim: int):
        super().__init__()
        check(config)
        self.config = config
        D = config.width
        self.embed = TokenEmbed(config.vocab_size, D)
        self.class_token = nn.Parameter(torch.zeros(1, 1, D)) if config.pool == "class" else None
        self.positions = TextPositions(config.tokens, D)
        self.encoder = make_encoder(config)
        self.pool = make_pool(config)
        self.projection = Projection(D, out_dim)

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
    """A learned vector per token, of length about 1."""

    def reset_parameters(self) -> None:
        normal_(self.weight, std=self.embedding_dim**-0.5)


class TextPositions(nn.Module):
    """A learned vector per place, added; shorter texts use the first ones."""

    def __init__(self, length: int, dim: int):
        super().__init__()
        self.table = nn.Parameter(torch.empty(1, length, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        normal_(self.table, std=0.02)

    def forward(self, x_BMD: Tensor) -> Tensor:
        return x_BMD + self.table[:, : x_BMD.shape[1]]


def real_tokens(tokens_BM: Tensor, end_token: int) -> Tensor:
    """(B, M) bool: True up to and with the first end token. There is always one: texts keep it when they are cut."""
    end_BM = tokens_BM == end_token
    return end_BM.cumsum(1) - end_BM.long() == 0


def check(config: TextConfig) -> None:
    for name in ("vocab_size", "length", "width", "depth", "mlp_dim", "heads"):
        if getattr(config, name) < 1:
            raise ValueError(f"text {name} must be at least 1, got {getattr(config, name)}")
    if not 0 <= config.end_token < config.vocab_size:
        raise ValueError(f"the end token must be one of the {config.vocab_size} tokens, got {config.end_token}")
    for name, allowed in {"pool": POOLS, "activation": tuple(ACTIVATIONS)}.items():
        if getattr(config, name) not in allowed:
            raise ValueError(f"text {name} must be one of {', '.join(allowed)}, got {getattr(config, name)!r}")
