"""The pooling of tokens to one vector, and the heads on it.

Letters: B images, M tokens, D width.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from softmoe.models.transformer import MLP, NORM_EPS, Attention, XavierLinear
from softmoe.moe.experts import lecun_normal_, xavier_uniform_


class MeanPool(nn.Module):
    def forward(self, x_BMD: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return x_BMD.mean(1)
        real_BM1 = mask.unsqueeze(-1)
        return (x_BMD * real_BM1).sum(1) / real_BM1.sum(1).clamp(min=1)


class FirstPool(nn.Module):
    """Takes the class token, which is the first."""

    def forward(self, x_BMD: Tensor, mask: Tensor | None = None) -> Tensor:
        return x_BMD[:, 0]


class LastPool(nn.Module):
    """Takes the last token; with a mask the last real one."""

    def forward(self, x_BMD: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return x_BMD[:, -1]
        place_M = torch.arange(mask.shape[1], device=mask.device)
        last_B = (mask * place_M).amax(1)
        return x_BMD.take_along_dim(last_B[:, None, None], 1).squeeze(1)


class AttentionPool(nn.Module):
    """Lets a learned probe attend to the tokens, followed by an MLP with a residual."""

    def __init__(
        self,
        dim: int,
        heads: int,
        hidden_dim: int,
        *,
        qk_norm: bool = True,
        activation: str = "gelu_tanh",
        norm_eps: float = NORM_EPS,
    ):
        super().__init__()
        self.probe = nn.Parameter(torch.empty(1, 1, dim))
        self.attention = Attention(dim, heads, qk_norm=qk_norm)
        self.norm = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = MLP(dim, hidden_dim, activation=activation)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        xavier_uniform_(self.probe, 1, self.probe.shape[-1])

    def forward(self, x_BMD: Tensor, mask: Tensor | None = None) -> Tensor:
        a = self.attention
        B, _, D = x_BMD.shape
        probe = self.probe.expand(B, 1, D)
        if isinstance(a.qkv, XavierLinear):  # only the probe has a query, and only tokens have keys and values
            weight_q, weight_kv = a.qkv.weight.split([D, 2 * D])
            bias_q, bias_kv = a.qkv.bias.split([D, 2 * D])
            query, keys_values = F.linear(probe, weight_q, bias_q), F.linear(x_BMD, weight_kv, bias_kv)
        else:  # what was put in its place, such as a LoRA, computes more than its weights say
            query, keys_values = a.qkv(probe)[..., :D], a.qkv(x_BMD)[..., D:]
        query_BA1E = query.unflatten(2, (a.heads, -1)).transpose(1, 2)
        key_BAME, value_BAME = keys_values.unflatten(2, (2, a.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed_BA1E = F.scaled_dot_product_attention(
            a.query_norm(query_BA1E).to(value_BAME.dtype),
            a.key_norm(key_BAME).to(value_BAME.dtype),
            value_BAME,
            attn_mask=None if mask is None else mask[:, None, None, :],
        )
        pooled_BD = a.out(mixed_BA1E.transpose(1, 2).flatten(2)).squeeze(1)
        return pooled_BD + self.mlp(self.norm(pooled_BD))


class Head(nn.Linear):
    """The classifier. It starts with zero weights and a bias of -ln(classes), so each class has about 1/classes."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.bias, -math.log(self.out_features))


class Projection(nn.Linear):
    """A linear map into the space of images and texts, drawn at random: zeros would pass no gradient to the tower."""

    def reset_parameters(self) -> None:
        lecun_normal_(self.weight, fan_in=self.in_features)
        nn.init.zeros_(self.bias)


class PreLogits(Projection):
    """A tanh layer before the head, as in the original ViT's from-scratch models."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).tanh()
