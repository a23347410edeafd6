"""Experts beside a kept MLP."""

from dataclasses import replace

import pytest
import torch
from routers import moe_of
from torch import nn

import softmoe
from softmoe.convert import to_vmoe
from softmoe.inspection import record
from softmoe.models import VisionTransformer, ViTConfig
from softmoe.models.config import check_same_function
from softmoe.moe import Experts, ExpertsBeside, MoE, SoftRouter
from softmoe.moe.config import ROUTERS

BASE = ViTConfig(image_size=16, patch_size=4, width=8, depth=2, mlp_dim=12, heads=2, num_classes=3)


def make_layer(D: int = 8, N: int = 3) -> ExpertsBeside:
    mlp = nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, D))
    return ExpertsBeside(mlp, SoftRouter(D, N), Experts(D, 2, N))


@pytest.mark.parametrize("router", ROUTERS)
def test_it_starts_as_the_mlp(router):
    """With any router a fresh layer gives exactly what the MLP gives, at every token, and its experts can learn."""
    layer = moe_of(router, 3, expert_dim=2, keep_mlp=True).make_layer(8, 12, 0.0, kept=nn.Linear(8, 8))
    assert isinstance(layer, ExpertsBeside)
    assert layer.experts.w1.shape == (3, 8, 2)
    x = torch.randn(2, 6, 8)
    y = layer(x)
    assert torch.equal(y, layer.mlp(x))
    y.square().sum().backward()
    assert layer.experts.w2.grad.abs().sum() > 0


def test_it_is_the_sum_of_mlp_and_moe():
    """Once trained, the output is the MLP's plus that of an MoE of the same router and experts."""
    layer = make_layer().double()
    for parameter in layer.experts.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    alone = MoE(layer.router, layer.experts)
    torch.testing.assert_close(layer(x), layer.mlp(x) + alone(x))
    assert not torch.allclose(layer(x), layer.mlp(x))


def test_masked_tokens_get_the_mlp_alone():
    """Masked tokens change no other output, and receive what the MLP gives them."""
    layer = make_layer()
    nn.init.normal_(layer.experts.w2)
    x, mask = torch.randn(2, 5, 8), torch.tensor([[True] * 3 + [False] * 2] * 2)
    y, changed = layer(x, mask), layer(torch.where(mask[..., None], x, torch.nan), mask)
    torch.testing.assert_close(y[~mask], layer.mlp(x)[~mask])
    assert torch.equal(y[mask], changed[mask])


def test_a_model_keeps_its_mlps(tmp_path):
    """A model with experts beside has all parameters of the dense one and more, and is the same after saving."""
    config = softmoe.models.registry.override(
        ViTConfig(**(vars(BASE) | {"moe": moe_of("soft", 3)})), {"expert_dim": 2, "keep_mlp": True, "blocks": (1,)}
    )
    model = VisionTransformer(config).eval()
    nn.init.normal_(model.encoder.blocks[1].mlp.experts.w2)
    softmoe.save_pretrained(model, tmp_path / "model")
    again = softmoe.from_pretrained(tmp_path / "model").eval()
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(again(images), model(images))
    assert again.config == config
    extra = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in VisionTransformer(BASE).parameters())
    assert extra == 3 * (2 * 8 * 2 + 2 + 8) + 3 * 8 + 1  # experts, slots, scale
    with record(model) as recording:
        model(images)
    assert list(recording.routings) == ["encoder.blocks.1.mlp"]


def test_the_kept_mlp_may_be_narrower(tmp_path):
    """`kept_dim` is the width of the MLPs beside experts alone; the other blocks' stay, and the model is saved so."""
    config = ViTConfig(**(vars(BASE) | {"moe": moe_of("soft", 3, keep_mlp=True, kept_dim=5, blocks=(1,))}))
    model = VisionTransformer(config).eval()
    first, second = (block.mlp for block in model.encoder.blocks[:2])
    assert (first.fc1.out_features, second.mlp.fc1.out_features) == (BASE.mlp_dim, 5)
    assert second.experts.w1.shape[-1] == BASE.mlp_dim
    softmoe.save_pretrained(model, tmp_path / "model")
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(softmoe.from_pretrained(tmp_path / "model").eval()(images), model(images))
    with pytest.raises(ValueError, match="kept_dim 5 and None"):
        check_same_function(config, replace(config, moe=None), "model")
    with pytest.raises(ValueError, match="kept_dim is the width of an MLP beside the experts, got 5: set keep_mlp"):
        moe_of("soft", 3, kept_dim=5)


def test_the_papers_code_has_no_such_layer():
    """Writing it in the naming of the paper's code is refused with the reason."""
    with pytest.raises(ValueError, match="no experts beside an MLP"):
        to_vmoe(make_layer())
