"""Pooling and the head."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from softmoe.models.heads import AttentionPool, FirstPool, Head, MeanPool, PreLogits


def test_attention_pool_by_hand():
    """The probe attends to the tokens head by head; an MLP with a residual follows; the probe itself has none."""
    pool = AttentionPool(8, 2, 16).double()
    for parameter in pool.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    a = pool.attention
    weight_q, weight_k, weight_v = a.qkv.weight.chunk(3)
    bias_q, bias_k, bias_v = a.qkv.bias.chunk(3)
    mixed = torch.zeros(3, 8, dtype=torch.float64)
    for b in range(3):
        query = pool.probe[0, 0] @ weight_q.T + bias_q
        keys, values = x[b] @ weight_k.T + bias_k, x[b] @ weight_v.T + bias_v
        for h in (slice(0, 4), slice(4, 8)):
            q = F.layer_norm(query[h], (4,), a.query_norm.weight, eps=1e-6)
            k = F.layer_norm(keys[:, h], (4,), a.key_norm.weight, eps=1e-6)
            mixed[b, h] = (k @ q / math.sqrt(4)).softmax(0) @ values[:, h]
    attended = mixed @ a.out.weight.T + a.out.bias
    normed = F.layer_norm(attended, (8,), pool.norm.weight, pool.norm.bias, eps=1e-6)
    hidden = F.gelu(normed @ pool.mlp.fc1.weight.T + pool.mlp.fc1.bias, approximate="tanh")
    expected = attended + hidden @ pool.mlp.fc2.weight.T + pool.mlp.fc2.bias
    torch.testing.assert_close(pool(x), expected)


@pytest.mark.parametrize("make", [MeanPool, FirstPool, lambda: AttentionPool(8, 2, 16)])
def test_pools_see_real_tokens_only(make):
    """A padded sequence gives the vector of the sequence alone."""
    pool = make().double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    padded = torch.cat([x, 100 * torch.randn(2, 3, 8, dtype=torch.float64)], dim=1)
    mask = torch.arange(8).expand(2, -1) < 5
    torch.testing.assert_close(pool(padded, mask), pool(x))


def test_mean_and_first():
    """The mean over tokens; the first token."""
    x = torch.randn(2, 5, 8)
    assert torch.equal(MeanPool()(x), x.mean(1))
    assert torch.equal(FirstPool()(x), x[:, 0])
    assert MeanPool()(x, torch.zeros(2, 5, dtype=torch.bool)).abs().max() == 0


def test_probe_start():
    """Xavier-uniform with fans 1 and D."""
    pool = AttentionPool(1024, 2, 16)
    bound = math.sqrt(6 / 1025)
    assert 0.95 * bound < pool.probe.abs().max() <= bound


def test_head_start():
    """Zero weights and a bias of -ln(classes); the tanh layer has zero bias and a lecun start."""
    head = Head(16, 29_593)
    assert head.weight.abs().max() == 0
    assert head.bias.unique().item() == pytest.approx(-math.log(29_593))
    pre = PreLogits(256, 256)
    assert pre.bias.abs().max() == 0
    assert pre.weight.std().item() == pytest.approx(1 / 16, rel=0.02)
    assert pre(100 * torch.randn(2, 256)).abs().max() <= 1


class LowRank(nn.Module):
    """A linear layer plus a product of low rank, whose weight is that of the layer alone, as PEFT has it."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.layer = layer
        self.a = nn.Parameter(torch.randn(2, layer.in_features, dtype=layer.weight.dtype))
        self.b = nn.Parameter(torch.randn(layer.out_features, 2, dtype=layer.weight.dtype))
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.a.T @ self.b.T


def test_what_stands_in_place_of_the_layer_takes_part():
    """An attention pool with a low-rank change computes what the joined weights compute, and the change learns."""
    pool = AttentionPool(8, 2, 16).double()
    joined = copy.deepcopy(pool)
    low: Any = LowRank(pool.attention.qkv)
    pool.attention.qkv = low
    joined.attention.qkv.weight.data += low.b.detach() @ low.a.detach()
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    found = pool(x)
    torch.testing.assert_close(found, joined(x))
    found.sum().backward()
    assert low.a.grad.any()
    assert low.b.grad.any()
