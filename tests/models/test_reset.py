"""Deferred initialization: built on the meta device, given memory, and every module reset by itself."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from softmoe.models import TwoTower, VisionTransformer
from softmoe.models.config import TextConfig, TwoTowerConfig, ViTConfig
from softmoe.models.moe_config import MoEConfig

SMALL: dict[str, Any] = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 2, "mlp_dim": 64, "heads": 2}
WITH_ALL: dict[str, Any] = {
    "pool": "class",
    "registers": 2,
    "layer_scale": True,
    "positions": "sincos",
    "pre_norm": True,
}


def with_experts(router: str, **options) -> VisionTransformer:
    return VisionTransformer(ViTConfig(**SMALL, moe=MoEConfig.of(router, 4, **options)))


def towers() -> TwoTower:
    text = TextConfig(vocab_size=20, length=6, width=32, depth=2, mlp_dim=64, heads=2, pool="class")
    return TwoTower(TwoTowerConfig(ViTConfig(**SMALL, num_classes=None), text, embed_dim=24))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "class token": lambda: VisionTransformer(ViTConfig(**SMALL, **WITH_ALL)),
    "attention pool": lambda: VisionTransformer(ViTConfig(**SMALL, pool="attention", representation_size=16)),
    "merger": lambda: VisionTransformer(ViTConfig(**SMALL, merge=(0, 4))),
    "soft": lambda: with_experts("soft"),
    "placed": lambda: with_experts("placed", frame=True),
    "tokens choice": lambda: with_experts("tokens_choice"),
    "beside an MLP": lambda: with_experts("soft", keep_mlp=True, expert_dim=16),
    "slots that stay": lambda: with_experts("placed", slots_stay=True),
    "two towers": towers,
}
ORDERS: dict[str, Callable[[nn.Module], Iterable[nn.Module]]] = {
    "parents first": lambda model: model.modules(),
    "parents last": lambda model: reversed(list(model.modules())),
    "owners alone": lambda model: [m for m in model.modules() if tensors(m, recurse=False)],  # as FSDP does
}


def tensors(model: nn.Module, recurse: bool = True) -> dict[str, Tensor]:
    return dict([*model.named_parameters(recurse=recurse), *model.named_buffers(recurse=recurse)])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_every_module_resets_what_it_owns(name, order):
    """Constants are those of a fresh model, and what is drawn has its mean and deviation, in whatever order."""
    with torch.device("meta"):
        model = MODELS[name]()
    model.to_empty(device="cpu")
    for tensor in tensors(model).values():
        tensor.fill_(torch.nan)
    for module in ORDERS[order](model):
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    fresh, other = tensors(MODELS[name]()), tensors(MODELS[name]())
    for key, found in tensors(model).items():
        if torch.equal(fresh[key], other[key]):
            assert torch.equal(found, fresh[key]), key
        else:
            error = 6 * found.numel() ** -0.5
            std = fresh[key].std().item()
            assert found.std().item() == pytest.approx(std, rel=error), key
            assert found.mean().item() == pytest.approx(fresh[key].mean().item(), abs=error * std), key
