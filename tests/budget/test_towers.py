"""The cost of two towers, against what is built and what runs."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from two_towers import shape

from softmoe.budget import cost, text_cost, training_flops
from softmoe.models import MoEConfig, TextTransformer, TwoTower
from softmoe.models.two_tower import TEXT_POOLS


@pytest.mark.parametrize("pool", TEXT_POOLS)
@pytest.mark.parametrize("moe", [None, MoEConfig.of(num_experts=3, slots_per_expert=2)])
def test_text_towers_are_counted_exactly(pool, moe):
    """Parameters and multiply-accumulates are those of the built tower."""
    config = replace(shape().text, pool=pool, moe=moe, mask_padding=False)
    price = text_cost(config, 24)
    with torch.device("meta"):
        model, tokens = TextTransformer(config, 24), torch.ones(1, config.length, dtype=torch.int64)
    assert price.params == sum(p.numel() for p in model.parameters())
    assert price.params == sum(part.params for part in price.parts.values())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens)
    assert counter.get_total_flops() == 2 * price.macs


def test_training_flops():
    """Both towers and the projection; a locked tower goes forward only, a cached one not at all.

    The projection then hands no gradient down.
    """
    config = shape(embed_dim=8)
    image, text = cost(config.image), text_cost(config.text, 8)
    projection = 6 * 16 * 8
    assert training_flops(config) == image.train_flops + text.train_flops + projection
    locked, last = ["text.projection.weight", "projection.weight"], 4 * 16 * 8
    assert training_flops(config, locked) == image.forward_flops + text.train_flops + last
    assert training_flops(config, locked, cached=True) == text.train_flops + last
    assert training_flops(config.image) == image.train_flops


@pytest.mark.parametrize("changes", [{}, {"embed_dim": 8}, {"bias_init": None}])
def test_both_towers_are_counted(changes):
    """The cost of two towers is that of an image and its text, as built and as run, and its parts sum to it."""
    config = shape(**changes)
    config = replace(config, text=replace(config.text, mask_padding=False))
    with torch.device("meta"):
        model, images = TwoTower(config), torch.zeros(1, 3, 16, 16)
        tokens = torch.ones(1, config.text.length, dtype=torch.int64)
    price = cost(model)
    assert price == cost(config)
    assert price.params == sum(p.numel() for p in model.parameters())
    assert price.params == sum(part.params for part in price.parts.values())
    assert price.macs == sum(part.macs for part in price.parts.values())
    assert price.train_flops == training_flops(config)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(images, tokens)
    assert counter.get_total_flops() == 2 * price.macs
