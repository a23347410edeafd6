"""Outputs and gradients of the reference code, reproduced through `convert` in float64."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from routers import moe_of
from torch import Tensor, nn

from softmoe.convert import from_vmoe, to_vmoe
from softmoe.models import MoEConfig, VisionTransformer, ViTConfig
from softmoe.moe import Router, Routing

FILES = sorted((Path(__file__).parent.parent / "golden").glob("*.npz"))
TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}

Arrays = dict[str, np.ndarray]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_reference_numbers(path: Path) -> None:
    """Output, auxiliary loss, input gradient and all parameter gradients agree with the reference to 1e-10."""
    with np.load(path) as file:
        arrays: Arrays = dict(file)
    parameters, settings = subset(arrays, "p/"), subset(arrays, "m/")
    whole_model = "embedding/kernel" in parameters
    module = (build_model if whole_model else build_layer)(parameters, settings, arrays["x"]).double().eval()
    from_vmoe(parameters, module)
    losses = collect_losses(module)

    x = torch.from_numpy(arrays["x"])
    x = x.permute(0, 3, 1, 2) if whole_model else x  # the reference has channels last
    x.requires_grad_()
    y = module(x)
    aux = torch.stack(losses).sum() if losses else torch.zeros((), dtype=x.dtype)
    loss = (y * torch.from_numpy(arrays["r"])).sum() + float(arrays["aux_weight"]) * aux
    loss.backward()

    assert x.grad is not None
    gx = x.grad.permute(0, 2, 3, 1) if whole_model else x.grad
    np.testing.assert_allclose(y.detach().numpy(), arrays["y"], **TOLERANCE)
    np.testing.assert_allclose(aux.detach().numpy(), arrays["aux"].mean(), **TOLERANCE)
    np.testing.assert_allclose(gx.numpy(), arrays["gx"], **TOLERANCE)
    expected = subset(arrays, "g/")
    gradients = to_vmoe(module, grad=True)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, expected[name], err_msg=name, **TOLERANCE)


def test_all_kinds_are_covered() -> None:
    """The folder holds the three routers and a whole model: an empty folder must not pass."""
    assert {"soft_n4p3", "tokens_k2_bpr1", "experts_c1.0", "vit_soft"} <= {path.stem for path in FILES}


def subset(arrays: Arrays, prefix: str) -> Arrays:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def collect_losses(module: nn.Module) -> list[Tensor]:
    """A list that the next forward pass fills with the auxiliary loss of every router."""
    losses: list[Tensor] = []

    def keep(_router: nn.Module, _inputs: Any, routing: Routing) -> None:
        losses.append(routing.auxiliary_loss)

    for router in module.modules():
        if isinstance(router, Router):
            router.register_forward_hook(keep)
    return losses


def moe_config(parameters: Arrays, settings: Arrays, **more: Any) -> MoEConfig:
    """`parameters` of one MoE layer. The importance loss alone is on, as in the files."""
    slots = parameters.get("Router/mu", np.empty((1, 1, 1))).shape[2]
    sparse = "tokens_choice" if "K" in settings else "experts_choice"
    router = "soft" if "Router/mu" in parameters else sparse
    return moe_of(
        router=router,
        num_experts=parameters["Mlp/Dense_0/kernel"].shape[0],
        slots_per_expert=slots,
        top_k=int(settings.get("K", 1)),
        capacity_factor=float(settings.get("cf", 1.0)),
        batch_priority=bool(settings.get("bpr", False)),
        group_size=int(settings["S"]) if "S" in settings else None,
        load_weight=0.0,
        **more,
    )


def build_layer(parameters: Arrays, settings: Arrays, x: np.ndarray) -> nn.Module:
    _, width, hidden = parameters["Mlp/Dense_0/kernel"].shape
    assert x.shape[-1] == width
    return moe_config(parameters, settings).make_layer(width, hidden, dropout=0.0)


def build_model(parameters: Arrays, settings: Arrays, x: np.ndarray) -> nn.Module:
    """Everything but the routing can be read off the shapes."""
    blocks = [subset(parameters, f"Encoder/encoderblock_{i}/") for i in range(len(parameters))]
    blocks = [block for block in blocks if block]
    moe_blocks = tuple(i for i, block in enumerate(blocks) if "Moe/Mlp/Dense_0/kernel" in block)
    moe = moe_config(subset(blocks[moe_blocks[0]], "Moe/"), settings, blocks=moe_blocks) if moe_blocks else None
    width, heads, _ = blocks[0]["SelfAttention/query/kernel"].shape
    hidden = next(array.shape[-1] for name, array in blocks[0].items() if name.endswith("Mlp/Dense_0/bias"))
    pool = {"cls": "class", "MapHead/probe": "attention"}
    learned = "Encoder/posembed_input/pos_embedding" in parameters
    config = ViTConfig(
        image_size=(x.shape[1], x.shape[2]),
        patch_size=parameters["embedding/kernel"].shape[0],
        width=width,
        depth=len(blocks),
        mlp_dim=hidden,
        heads=heads,
        num_classes=parameters["head/bias"].shape[0] if "head/bias" in parameters else None,
        pool=next((ours for name, ours in pool.items() if name in parameters), "mean"),
        positions="learned" if learned else str(settings.get("positions", "sincos")),
        qk_norm="SelfAttention/query_ln/scale" in blocks[0],
        representation_size=parameters["pre_logits/bias"].shape[0] if "pre_logits/bias" in parameters else None,
        moe=moe,
    )
    return VisionTransformer(config)
