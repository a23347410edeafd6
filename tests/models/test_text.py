"""The text tower: pooling, padding, positions."""

import pytest
import torch

from softmoe.models import MoEConfig, TextConfig, TextTransformer
from softmoe.models.heads import LastPool
from softmoe.models.two_tower import TEXT_POOLS, real_tokens

END = 1


def tower(**changes) -> TextTransformer:
    options = {"vocab_size": 20, "length": 12, "width": 16, "depth": 2, "mlp_dim": 32, "heads": 2} | changes
    model = TextTransformer(TextConfig(**options), 8).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # nothing starts at zero
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.mark.parametrize("pool", TEXT_POOLS)
@pytest.mark.parametrize("moe", [None, MoEConfig.of(num_experts=3, slots_per_expert=2)])
def test_padding_changes_nothing(pool, moe):
    """With the mask, more end tokens after the first give the same vector and gradients, with experts too."""
    model = tower(pool=pool, moe=moe, mask_padding=True)
    short = torch.tensor([[3, 4, 5, END], [7, END, END, END]])
    long = torch.cat([short, torch.full((2, 8), END)], dim=1)
    found = []
    for tokens in (short, long):
        model.zero_grad()
        out = model(tokens)
        out.square().sum().backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append((out.detach(), gradients))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=1e-12)
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(gradient, found[1][1][name], rtol=0, atol=1e-10, msg=name)


def test_without_the_mask_padding_is_read():
    """As in the paper's code: the vector is that of the last place, and more padding is another text."""
    model = tower()
    short = torch.tensor([[3, 4, END, END]])
    assert not torch.allclose(model(short), model(torch.cat([short, short[:, 2:]], dim=1)))
    encoded = model.encoder(model.positions(model.embed(short)))
    torch.testing.assert_close(model(short), model.projection(encoded[:, -1]))


def test_real_tokens():
    """Up to and with the first end token; all where there is none."""
    tokens = torch.tensor([[5, END, END, 4], [END, END, END, END], [2, 3, 4, 5]])
    assert real_tokens(tokens, END).int().tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]


def test_last_pool_takes_the_last_real_token():
    """Row by row."""
    x = torch.randn(3, 4, 5)
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]).bool()
    torch.testing.assert_close(LastPool()(x, mask), torch.stack([x[0, 1], x[1, 0], x[2, 3]]))
    torch.testing.assert_close(LastPool()(x), x[:, -1])


def test_order_matters():
    """Positions are learned: the same words in another order are another text."""
    model = tower(mask_padding=True)
    assert not torch.allclose(model(torch.tensor([[3, 4, END]])), model(torch.tensor([[4, 3, END]])))


def test_start():
    """Vectors of tokens have about length 1, positions are small, the projection is not zero."""
    model = TextTransformer(TextConfig(vocab_size=500, width=64, depth=1, mlp_dim=64, heads=2), 32).requires_grad_(
        False
    )
    assert float(model.embed.weight.norm(dim=1).mean()) == pytest.approx(1.0, abs=0.05)
    assert float(model.positions.table.std()) == pytest.approx(0.02, abs=0.003)
    assert float(model.projection.weight.std()) == pytest.approx(1 / 8, rel=0.1)
    assert model.projection.bias.abs().max() == 0


@pytest.mark.parametrize(
    "tokens", [torch.zeros(2, 13).long(), torch.zeros(2, 0).long(), torch.zeros(3).long(), torch.zeros(2, 4)]
)
def test_wrong_tokens(tokens):
    """Too many, none, no batch, no whole numbers."""
    with pytest.raises(ValueError, match=r"expected token numbers of shape \(batch, 1 to 12\)"):
        tower()(tokens)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pool": "first"}, "pool must be one of last, mean, class, attention, got 'first'"),
        ({"length": 0}, "length must be at least 1"),
        ({"end_token": 20}, "the end token must be one of the 20 tokens"),
    ],
)
def test_wrong_settings(changes, words):
    """Said in one sentence."""
    with pytest.raises(ValueError, match=words):
        tower(**changes)
