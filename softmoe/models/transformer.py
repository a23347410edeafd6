"""The pre-norm transformer; any (B, M, D) -> (B, M, D) module can take the place of a block's MLP.

Letters: B sequences, M tokens, D width, A heads, E head width.
"""

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from softmoe.moe import MoE, ToSlots
from softmoe.moe.experts import make_gelu, normal_, xavier_uniform_

NORM_EPS = 1e-6
LAYER_SCALE = 1e-5  # at the start, so that a fresh block is nearly the identity (CaiT, DINOv2)


class XavierLinear(nn.Linear):
    """A linear layer that draws its weights with the fans it is told and its bias with `bias_std`, whoever resets it.

    Its owner resets it once all its parts are built. Before, the weights are torch's own draw, so that a seed gives
    the numbers that it gives with plain linear layers.
    """

    built = False

    def __init__(self, dim: int, out_dim: int, *, fan_out: int, bias_std: float = 0.0):
        super().__init__(dim, out_dim)
        self.fan_out, self.bias_std = fan_out, bias_std
        self.built = True

    def reset_parameters(self) -> None:
        if not self.built:
            super().reset_parameters()
            return
        xavier_uniform_(self.weight, self.in_features, self.fan_out)
        if self.bias_std:
            normal_(self.bias, std=self.bias_std)
        else:
            nn.init.zeros_(self.bias)


class Attention(nn.Module):
    """Multi-head self-attention. Queries and keys are normalized per head (scale only), which keeps training stable."""

    def __init__(self, dim: int, heads: int, *, qk_norm: bool = True, dropout: float = 0.0):
        super().__init__()
        if heads < 1 or dim % heads:
            raise ValueError(f"heads must divide the width: {dim} is not a multiple of {heads}")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"attention dropout must be in [0, 1), got {dropout}")
        self.heads = heads
        self.dropout = dropout
        self.qkv = XavierLinear(dim, 3 * dim, fan_out=dim)  # each of q, k, v is a D x D matrix of its own
        self.out = XavierLinear(dim, dim, fan_out=dim)
        head_dim = dim // heads
        self.query_norm = nn.LayerNorm(head_dim, eps=NORM_EPS, bias=False) if qk_norm else nn.Identity()
        self.key_norm = nn.LayerNorm(head_dim, eps=NORM_EPS, bias=False) if qk_norm else nn.Identity()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.qkv.reset_parameters()
        self.out.reset_parameters()

    def forward(self, x_BMD: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = (part.unflatten(2, (self.heads, -1)) for part in self.qkv(x_BMD).chunk(3, dim=2))
        query, key = self.query_norm(query).to(value.dtype), self.key_norm(key).to(value.dtype)
        mixed_BAME = F.scaled_dot_product_attention(
            *(part_BMAE.transpose(1, 2) for part_BMAE in (query, key, value)),
            attn_mask=None if mask is None else mask[:, None, None, :],
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.out(mixed_BAME.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """A linear layer, a GELU and a linear layer."""

    def __init__(self, dim: int, hidden_dim: int, *, dropout: float = 0.0, activation: str = "gelu_tanh"):
        super().__init__()
        self.fc1 = XavierLinear(dim, hidden_dim, fan_out=hidden_dim, bias_std=1e-6)
        self.fc2 = XavierLinear(hidden_dim, dim, fan_out=dim, bias_std=1e-6)
        self.dropout = nn.Dropout(dropout)
        self.activation = activation
        self.gelu = make_gelu(activation)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.fc1.reset_parameters()
        self.fc2.reset_parameters()

    def forward(self, x_BMD: Tensor) -> Tensor:
        hidden = self.dropout(self.gelu(self.fc1(x_BMD)))
        return self.dropout(self.fc2(hidden))


class DropPath(nn.Module):
    """Stochastic depth: in training, drops a branch for some images and scales it up for the others."""

    def __init__(self, rate: float):
        super().__init__()
        if not 0.0 <= rate < 1.0:
            raise ValueError(f"drop_path must be in [0, 1), got {rate}")
        self.rate = rate

    def forward(self, x_BMD: Tensor) -> Tensor:
        if not self.training or not self.rate:
            return x_BMD
        kept_B11 = torch.empty(len(x_BMD), 1, 1, dtype=x_BMD.dtype, device=x_BMD.device).bernoulli_(1.0 - self.rate)
        return x_BMD * (kept_B11 / (1.0 - self.rate))


class PatchMerger(nn.Module):
    """Merges an image's tokens into fewer ones (arXiv 2202.12015).

    Each merged token is a weighted mean of the normalized tokens; the weights are the softmax, over the tokens, of
    their products with a learned query. The first `prefix` tokens, which belong to no patch, are kept.

    There is no way back to the tokens, as a Soft MoE's combine has one.
    """

    def __init__(self, dim: int, tokens: int, prefix: int = 0, norm_eps: float = NORM_EPS):
        super().__init__()
        self.prefix = prefix
        self.norm = nn.LayerNorm(dim, eps=norm_eps)
        self.queries = nn.Parameter(torch.empty(tokens, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        normal_(self.queries, std=self.queries.shape[1] ** -0.5)  # first logits have a variance of 1

    def forward(self, x_BMD: Tensor) -> Tensor:
        normed_BMD = self.norm(x_BMD[:, self.prefix :])
        weights_BSM = (self.queries @ normed_BMD.transpose(1, 2)).softmax(dim=-1)
        merged_BSD = weights_BSM.to(normed_BMD.dtype) @ normed_BMD
        return torch.cat([x_BMD[:, : self.prefix], merged_BSD], dim=1) if self.prefix else merged_BSD


class Block(nn.Module):
    """A transformer block: x + attention(norm(x)), then x + mlp(norm(x)).

    With `layer_scale` the output of each branch is multiplied by a learned vector. A `merger`, if there is one, turns
    the tokens into fewer at the end.
    """

    def __init__(
        self,
        dim: int,
        attention: nn.Module,
        mlp: nn.Module,
        *,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        norm_eps: float = NORM_EPS,
        layer_scale: bool = False,
        merger: nn.Module | None = None,
    ):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.attention = attention
        self.dropout = nn.Dropout(dropout)
        self.drop_path = DropPath(drop_path)
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = mlp
        self.scale1 = nn.Parameter(torch.empty(dim)) if layer_scale else None
        self.scale2 = nn.Parameter(torch.empty(dim)) if layer_scale else None
        self.merger = merger
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for scale in (self.scale1, self.scale2):
            if scale is not None:
                nn.init.constant_(scale, LAYER_SCALE)

    def forward(self, x_BMD: Tensor, mask: Tensor | None = None, grid: tuple[int, int] | None = None) -> Tensor:
        x_BMD = self.attend(x_BMD, mask)
        normed_BMD = self.norm2(x_BMD)
        if isinstance(self.mlp, ToSlots):
            x_BMD, mixed_BMD = self.mlp(normed_BMD, mask, grid, residual=x_BMD)
        else:
            mixed_BMD = self.mlp(normed_BMD, mask, grid) if isinstance(self.mlp, MoE) else self.mlp(normed_BMD)
        x_BMD = x_BMD + self.drop_path(mixed_BMD if self.scale2 is None else self.scale2 * mixed_BMD)
        return x_BMD if self.merger is None else self.merger(x_BMD)

    def attend(self, x_BMD: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute the first half of the block."""
        attended_BMD = self.attention(self.norm1(x_BMD), mask)
        scaled_BMD = attended_BMD if self.scale1 is None else self.scale1 * attended_BMD
        return x_BMD + self.drop_path(self.dropout(scaled_BMD))


class Encoder(nn.Module):
    """A stack of blocks and a last norm. `make_mlp(index)` builds the MLP of a block, or what replaces it.

    `last_norm=False` leaves the last norm out, for models that have it after pooling. `merger` is the number of a block
    and the module that merges the tokens after it.
    """

    def __init__(
        self,
        dim: int,
        depth: int,
        heads: int,
        make_mlp: Callable[[int], nn.Module],
        *,
        qk_norm: bool = True,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        drop_path: float = 0.0,
        norm_eps: float = NORM_EPS,
        layer_scale: bool = False,
        last_norm: bool = True,
        merger: tuple[int, nn.Module] | None = None,
    ):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(
                dim,
                Attention(dim, heads, qk_norm=qk_norm, dropout=attention_dropout),
                make_mlp(index),
                dropout=dropout,
                drop_path=drop_path * index / max(1, depth - 1),
                norm_eps=norm_eps,
                layer_scale=layer_scale,
                merger=merger[1] if merger is not None and merger[0] == index else None,
            )
            for index in range(depth)
        )
        self.norm = nn.LayerNorm(dim, eps=norm_eps) if last_norm else nn.Identity()
        self.recomputed: Collection[int] = ()
        """Blocks of which only the input is kept; their inside is computed again in the backward pass."""

    def forward(self, x_BMD: Tensor, mask: Tensor | None = None, grid: tuple[int, int] | None = None) -> Tensor:
        """Apply all blocks. `grid` is (rows, columns) of an image's patches, which are the last tokens."""
        return self.norm(self.forward_blocks(x_BMD, mask, grid)[0])

    def forward_blocks(
        self,
        x_BMD: Tensor,
        mask: Tensor | None = None,
        grid: tuple[int, int] | None = None,
        taken: Collection[int] = (),
        depth: int | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the output of the last block, before the last norm, and, in order, those of the blocks `taken`.

        `depth` stops after so many blocks.
        """
        outputs: list[Tensor] = []
        x_BMD = self.dropout(x_BMD)
        for index, block in enumerate(self.blocks[:depth]):
            if index in self.recomputed and self.training:
                x_BMD = checkpoint(block, x_BMD, mask, grid, use_reentrant=False)
            else:
                x_BMD = block(x_BMD, mask, grid)
            if isinstance(block.mlp, ToSlots):
                mask = grid = None  # slots are all real, and have no cells
            if index in taken:
                outputs.append(x_BMD)
        return x_BMD, outputs
