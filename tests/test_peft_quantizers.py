"""Other people's LoRA and quantizers on models whose experts are stacked weights.

PEFT, torchao and bitsandbytes are no dependencies: their tests run where they are installed. What PEFT does to a
stacked weight is done by hand besides, with torch's own parametrization, so that it is always tried.
"""

import importlib
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import softmoe
from softmoe.models import VisionTransformer
from softmoe.moe import Experts

IMAGES = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))
TARGETS = {
    "target_modules": ["qkv", "out", "fc1", "fc2"],
    "target_parameters": ["mlp.experts.w1", "mlp.experts.w2"],
    "modules_to_save": ["head"],
}


def a_model() -> VisionTransformer:
    """Two blocks, the second with experts; the same at every call."""
    torch.manual_seed(0)
    model = softmoe.create_model("soft_ti8_4e", num_classes=3, image_size=16, width=64, heads=2, mlp_dim=128, depth=2)
    nn.init.normal_(model.head.weight)
    return model.eval()


def installed(name: str):
    """The package, or a skipped test; what it warns of at its import is not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, exc_type=ImportError)


def experts(model: nn.Module) -> Experts:
    return next(module for module in model.modules() if isinstance(module, Experts))


class LowRank(nn.Module):
    """A weight of N matrices plus a product of low rank for each, as PEFT adds it."""

    def __init__(self, weight: Tensor):
        super().__init__()
        N, D, H = weight.shape
        self.a, self.b = nn.Parameter(torch.randn(N, D, 2) / 8), nn.Parameter(torch.randn(N, 2, H) / 8)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.a @ self.b


@pytest.mark.parametrize("fast", [False, True], ids=["plain", "accelerated"])
def test_a_low_rank_change_of_stacked_weights(fast: bool):
    """It computes what the joined weights compute, with accelerations too, and every part of it has a gradient."""
    model, joined = a_model(), a_model()
    parts = []
    for name in ("w1", "w2"):
        parts.append(LowRank(getattr(experts(model), name)))
        parametrize.register_parametrization(experts(model), name, parts[-1])
        getattr(experts(joined), name).data += parts[-1].a.detach() @ parts[-1].b.detach()
    if fast:
        softmoe.accelerate.apply(model)
    outputs = model.train()(IMAGES)
    torch.testing.assert_close(outputs, joined.train()(IMAGES), rtol=1e-4, atol=1e-4)
    outputs.square().sum().backward()
    assert all(part.grad is not None and part.grad.any() for low in parts for part in low.parameters())


def test_peft(tmp_path: Path):
    """target_parameters reaches experts: it starts as the model was, learns, is saved alone, and joins in one call."""
    peft = installed("peft")
    model = peft.get_peft_model(a_model(), peft.LoraConfig(r=2, **TARGETS))
    torch.testing.assert_close(model.eval()(IMAGES), a_model()(IMAGES))
    softmoe.accelerate.apply(model)
    learned = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(learned, lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model.train()(IMAGES), torch.tensor([0, 1, 2])).backward()
        optimizer.step()
    assert all(p.grad is not None and p.grad.any() for p in learned)
    wanted = model.eval()(IMAGES)
    model.save_pretrained(tmp_path / "lora")
    again = peft.PeftModel.from_pretrained(a_model(), tmp_path / "lora").eval()
    torch.testing.assert_close(again(IMAGES), wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="merge_and_unload"):
        softmoe.save_pretrained(again, tmp_path / "whole")
    softmoe.save_pretrained(again.merge_and_unload(), tmp_path / "whole")
    whole = softmoe.from_pretrained(tmp_path / "whole")
    torch.testing.assert_close(whole(IMAGES), wanted, rtol=1e-4, atol=1e-4)
    change = experts(whole).w1 - experts(a_model()).w1
    assert torch.linalg.matrix_rank(change, atol=1e-5).tolist() == [2, 2, 2, 2]


def test_torchao(tmp_path: Path):
    """It takes the linear layers, ours the experts, in this order; the other order and saving are refused."""
    installed("torchao")
    quantization = importlib.import_module("torchao.quantization")
    model, wanted = a_model(), a_model()(IMAGES)
    prepared = softmoe.inference.prepare(model, weights="int8")
    for quantized in (model, prepared):
        quantization.quantize_(quantized, quantization.Int8WeightOnlyConfig())
        with torch.no_grad():
            torch.testing.assert_close(quantized(IMAGES), wanted, rtol=0.1, atol=0.3)
        assert type(quantized.encoder.blocks[0].mlp.fc1.weight).__name__ == "Int8Tensor"
    assert type(experts(model).w1) is nn.Parameter
    with pytest.raises(ValueError, match="prepare first"):
        softmoe.inference.prepare(model, weights="int8")
    with pytest.raises(ValueError, match="save a model before it is quantized"):
        softmoe.save_pretrained(model, tmp_path / "model")


def test_bitsandbytes(tmp_path: Path):
    """Stacked experts in four bits, a parameter at a time; such a model is not saved."""
    installed("bitsandbytes")
    four = importlib.import_module("bitsandbytes.nn.parametrize")
    model, wanted = a_model(), a_model()(IMAGES)
    for name in ("w1", "w2"):
        four.replace_parameter_4bit(experts(model), name)
    with torch.no_grad():
        torch.testing.assert_close(model(IMAGES), wanted, rtol=0.2, atol=1.0)
    assert experts(model).parametrizations.w1.original.dtype == torch.uint8
    with pytest.raises(ValueError, match="not part of the model"):
        softmoe.save_pretrained(model, tmp_path / "model")


class Stranger(Tensor):
    """A weight of a kind that is not torch's own, as quantizers make them."""


def test_weights_of_a_strange_kind(tmp_path: Path):
    """A quantizer's weights are neither saved nor prepared; one sentence names them."""
    model = a_model()
    weight = torch.zeros(3, 64).as_subclass(Stranger)
    model.head.weight = nn.Parameter(weight, requires_grad=False)
    with pytest.raises(ValueError, match=r"head\.weight is a Stranger: save a model before it is quantized"):
        softmoe.save_pretrained(model, tmp_path / "model")
    with pytest.raises(ValueError, match="a weight is a Stranger already: prepare first"):
        softmoe.inference.prepare(model, weights="int8")
