"""Blocks and the encoder, with padding."""

import pytest
import torch
from torch import nn

from softmoe.models.transformer import MLP, Attention, Encoder
from softmoe.moe import Experts, ExpertsChoiceRouter, IdentityRouter, MoE, SoftRouter, TokensChoiceRouter, UniformRouter

MLPS = {
    "dense": lambda: MLP(8, 16),
    "soft": lambda: MoE(SoftRouter(8, 4, 2), Experts(8, 16, 4)),
    "uniform": lambda: MoE(UniformRouter(8, 4), Experts(8, 16, 4)),
    "identity": lambda: MoE(IdentityRouter(8, 4), Experts(8, 16, 4)),
    "tokens_choice": lambda: MoE(TokensChoiceRouter(8, 4, capacity=2), Experts(8, 16, 4)),
    "experts_choice": lambda: MoE(ExpertsChoiceRouter(8, 4, capacity=2), Experts(8, 16, 4)),
}


@pytest.mark.parametrize("name", MLPS)
def test_padding_changes_nothing(name):
    """Through attention and every router, a padded sequence gives its real tokens what it gives them alone."""
    encoder = Encoder(8, 3, 2, lambda index: MLPS[name]()).double().eval()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    padded = torch.cat([x, 100 * torch.randn(2, 4, 8, dtype=torch.float64)], dim=1)
    mask = torch.arange(9).expand(2, -1) < 5
    torch.testing.assert_close(encoder(padded, mask)[:, :5], encoder(x))


def test_sequences_of_different_lengths_in_one_batch():
    """Each padded sequence is as if it were alone."""
    encoder = Encoder(8, 2, 2, lambda index: MLPS["soft"]()).double().eval()
    x = torch.randn(3, 6, 8, dtype=torch.float64)
    lengths = (6, 2, 4)
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    together = encoder(x, mask)
    for index, length in enumerate(lengths):
        torch.testing.assert_close(together[index, :length], encoder(x[index : index + 1, :length])[0])


def test_a_sequence_without_real_tokens_is_finite():
    """An empty row of a batch brings no NaN, forward or backward."""
    encoder = Encoder(8, 2, 2, lambda index: MLPS["soft"]())
    mask = torch.tensor([[True] * 4, [False] * 4])
    y = encoder(torch.randn(2, 4, 8), mask)
    assert y.isfinite().all()
    y[mask].sum().backward()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in encoder.parameters())


def test_dropout_places():
    """Embedding, attention output and MLP drop in training; nothing does in evaluation."""
    encoder = Encoder(8, 2, 2, lambda index: MLP(8, 16, dropout=0.5), dropout=0.5, attention_dropout=0.5)
    x = torch.randn(2, 5, 8)
    assert not torch.equal(encoder.train()(x), encoder(x))
    assert torch.equal(encoder.eval()(x), encoder(x))
    assert sum(isinstance(module, nn.Dropout) and module.p == 0.5 for module in encoder.modules()) == 1 + 2 + 2


def test_attention_dropout_acts_alone():
    """attention_dropout drops attention weights and nothing else."""
    attention = Attention(8, 2, dropout=0.5)
    x = torch.randn(2, 5, 8)
    assert not torch.equal(attention.train()(x), attention(x))
    assert torch.equal(attention.eval()(x), attention(x))


def test_heads_must_divide_the_width():
    """Said when the module is built."""
    for heads in (3, 0):
        with pytest.raises(ValueError, match=f"8 is not a multiple of {heads}"):
            Attention(8, heads)
