"""Every router has a frozen config, and both say the same."""

import inspect
from dataclasses import FrozenInstanceError, fields

import pytest
import torch

from softmoe.moe import SoftMoE
from softmoe.moe.config import ROUTERS


@pytest.mark.parametrize("name", ROUTERS)
def test_config_and_constructor_agree(name: str):
    """The fields of a config are the arguments of its router, with the same defaults; build gives each its value."""
    config = ROUTERS[name](num_experts=3)
    router = config.build(8)
    arguments = inspect.signature(type(router)).parameters
    theirs = {key: p.default for key, p in arguments.items() if key != "dim"}
    ours = {f.name: f.default for f in fields(config)}
    assert theirs.pop("num_experts") is inspect.Parameter.empty
    ours.pop("num_experts")
    assert theirs == ours
    assert (router.dim, router.num_experts, config.name) == (8, 3, name)
    with pytest.raises(FrozenInstanceError):
        config.num_experts = 4  # pyright: ignore[reportAttributeAccessIssue]


def test_the_ready_made_layer_passes_its_options_on():
    """`scale_init`, `noise_std` and `normalize` reach the router, `activation` and the others the experts."""
    layer = SoftMoE(8, 2, scale_init=3.0, noise_std=0.5, activation="gelu", dropout=0.1, identical_init=True)
    assert (layer.router.scale_init, layer.router.noise_std) == (3.0, 0.5)
    assert (layer.experts.activation, layer.experts.dropout) == ("gelu", 0.1)
    assert torch.equal(layer.experts.w1[0], layer.experts.w1[1])
    assert SoftMoE(8, 2, normalize=False).router.scale is None
