"""Whole Soft MoE models through compilers, exporters and function transforms."""

import pytest
import torch
from torch.func import functional_call, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from softmoe import create_model
from softmoe.machine import bfloat16_works
from softmoe.models import VisionTransformer

TINY = {"width": 16, "depth": 2, "mlp_dim": 32, "heads": 2, "num_classes": 5, "image_size": 32}


def tiny(name: str = "soft_ti16_4e2p", **options) -> VisionTransformer:
    model = create_model(name, **(TINY | options))
    torch.nn.init.normal_(model.head.weight)
    return model


STAY = {"blocks": (0, 1), "slots_stay": True}


@pytest.mark.parametrize("options", [{"pool": "mean"}, {"pool": "class"}, {"pool": "attention"}, STAY])
def test_compiles_without_a_graph_break(options):
    """fullgraph=True, traced through the autograd compiler: eager's logits and gradients."""
    torch.compiler.reset()
    model = tiny(**options).double()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    expected, found = model(images), compiled(images)
    torch.testing.assert_close(found, expected)
    inputs = list(model.parameters())
    for ours, theirs in zip(
        torch.autograd.grad(found.square().sum(), inputs),
        torch.autograd.grad(expected.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("pool", ["mean", "class", "attention"])
def test_exports_with_dynamic_batch(pool):
    """One exported program serves every batch size, with eager's logits."""
    model = tiny(pool=pool).eval()
    batch = torch.export.Dim("batch", min=1, max=256)
    program = torch.export.export(model, (torch.randn(2, 3, 32, 32),), dynamic_shapes=({0: batch},)).module()
    for size in (1, 2, 7):
        images = torch.randn(size, 3, 32, 32)
        torch.testing.assert_close(program(images), model(images))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own, in jvp
def test_function_transforms():
    """functional_call, vmap over the batch and jvp through a whole model."""
    model = tiny().double().eval().requires_grad_(False)
    images = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    expected = model(images)
    torch.testing.assert_close(functional_call(model, dict(model.named_parameters()), (images,)), expected)
    direction = torch.randn_like(images)
    with sdpa_kernel(SDPBackend.MATH):  # the fused attention has no rule for either
        torch.testing.assert_close(vmap(lambda image: model(image[None])[0])(images), expected)
        _, derivative = jvp(model, (images,), (direction,))
    step = 1e-6
    difference = (model(images + step * direction) - model(images - step * direction)) / (2 * step)
    torch.testing.assert_close(derivative, difference, rtol=1e-4, atol=1e-5)


def test_autocast():
    """bfloat16 autocast trains: finite float32 gradients near those without it."""
    if not bfloat16_works():
        pytest.skip("this machine's bfloat16 products crash")
    model = tiny().train()
    images = torch.randn(2, 3, 32, 32)
    expected = model(images)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(images)
    torch.testing.assert_close(logits.float(), expected, rtol=0.1, atol=0.3)
    logits.float().square().sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.isfinite().all()
