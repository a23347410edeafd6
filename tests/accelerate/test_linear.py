"""Linear layers by oneDNN against torch's in float64."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from transforms import TRANSFORMS

from softmoe.accelerate import guards
from softmoe.accelerate import linear as module
from softmoe.machine import is_amd_avx512
from softmoe.models.transformer import MLP

needs_product = pytest.mark.skipif(not module.self_test(), reason="this torch has no such product")


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes that oneDNN gets from now on, on any processor; small tensors are worth it too."""
    calls: list[tuple[int, ...]] = []
    monkeypatch.setattr(guards, "LARGE", 0)
    monkeypatch.setattr(module, "LARGE", 0)
    monkeypatch.setattr(module, "use_onednn", lambda: True)
    plain = module._onednn
    monkeypatch.setattr(module, "_onednn", lambda x, *args: (calls.append(tuple(x.shape)), plain(x, *args))[1])
    return calls


def dense(x: Tensor, layer: nn.Module) -> Tensor:
    """The layer's output, with the fast class in the place of nn.Linear."""
    guards.swap_class(layer, nn.Linear, module.OneDNNLinear)
    return layer(x)


def outputs_and_gradients(x: Tensor, layer: nn.Linear, upstream: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = dense(x, layer)
    return [y, *torch.autograd.grad(y, (x, *layer.parameters()), upstream.to(y))]


@needs_product
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("shape", "width"), [((2, 7, 24), 40), ((1, 1, 5), 3), ((3, 130, 64), 16), ((9, 8), 24)])
def test_outputs_and_gradients(products: list, shape: tuple[int, ...], width: int, bias: bool) -> None:
    layer, x = nn.Linear(shape[-1], width, bias=bias), torch.randn(shape)
    upstream = torch.randn(width, *shape[:-1]).movedim(0, -1)
    found = outputs_and_gradients(x, layer, upstream)
    assert products == [shape, (*shape[:-1], width)]
    exact = outputs_and_gradients(x.double(), layer.double(), upstream)
    assert len(products) == 2, "float64 is not for it"
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


@needs_product
def test_only_what_is_asked_for(products: list) -> None:
    layer, x = nn.Linear(8, 8), torch.randn(2, 3, 8, requires_grad=True)
    layer.weight.requires_grad_(False)
    dense(x, layer).sum().backward()
    assert layer.weight.grad is None
    assert layer.bias.grad is not None
    assert x.grad is not None


@needs_product
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_see_what_they_can_derive(products: list, transform: Callable[..., Tensor]) -> None:
    x, layer = torch.randn(3, 4, 8), nn.Linear(8, 6)
    found = transform(lambda x: dense(x, layer).pow(3).sum(), x.clone())
    layer = layer.double()
    exact = transform(lambda x: layer(x).pow(3).sum(), x.double())
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-4)


@needs_product
def test_whoever_listens_is_heard(products: list) -> None:
    """Hooks, layers of another kind, autocast, no linear layer at all. In evaluation it is the same product."""

    class Adapted(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    x, heard, layer = torch.randn(1, 4, 8, requires_grad=True), [], nn.Linear(8, 8)
    adapted = Adapted(8, 8)
    adapted.load_state_dict(layer.state_dict())
    torch.testing.assert_close(dense(x, adapted), layer(x) * 2)
    layer.register_forward_hook(lambda *args: heard.append(args[2].shape))
    dense(x, layer)
    assert heard == [(1, 4, 8)]
    layer = nn.Linear(8, 8)
    layer.register_full_backward_hook(lambda *_: heard.append("backward"))
    dense(x, layer).sum().backward()
    with module_hooks.register_module_forward_hook(lambda *_: heard.append("everyone's")):
        dense(x, nn.Linear(8, 8))
    layer = nn.Linear(8, 8)
    layer.forward = lambda input: input * 3
    products.clear()
    assert torch.equal(dense(x, layer), x * 3)
    assert heard == [(1, 4, 8), "backward", "everyone's"]
    assert torch.equal(dense(x, nn.Identity()), x)
    with torch.autocast("cpu", torch.float16):
        assert dense(x, nn.Linear(8, 8)).dtype == torch.float16
    assert products == []
    with torch.no_grad():
        torch.testing.assert_close(dense(x, layer := nn.Linear(8, 8)), nn.functional.linear(x, *layer.parameters()))
    assert products == [(1, 4, 8)]


@needs_product
def test_mlp_with_and_without(products: list, monkeypatch: pytest.MonkeyPatch) -> None:
    mlp = MLP(16, 48)
    assert module.switch_on(mlp) == "2 layers"
    x, upstream = torch.randn(2, 7, 16, requires_grad=True), torch.randn(2, 7, 16)

    def run() -> list[Tensor]:
        y = mlp(x)
        return [y, *torch.autograd.grad(y, (x, *mlp.parameters()), upstream)]

    found = run()
    assert len(products) == 4
    monkeypatch.setattr(module, "use_onednn", lambda: False)
    for one, other in zip(found, run(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert len(products) == 4


def test_a_torch_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator that is gone, or takes other arguments, is left alone."""

    def gone(*_: object) -> Tensor:
        raise AttributeError("no such operator")

    monkeypatch.setattr(module, "_onednn", gone)
    assert not module.self_test()


@pytest.mark.parametrize(
    ("vendor", "flags", "expected"),
    [
        ("AuthenticAMD", "fpu avx2 avx512f", True),
        ("AuthenticAMD", "fpu avx2", False),
        ("GenuineIntel", "fpu avx2 avx512f", False),
    ],
)
def test_which_processor(tmp_path: Path, vendor: str, flags: str, expected: bool) -> None:
    """The first core decides; a system without the file is none of them."""
    (tmp_path / "cpuinfo").write_text(f"vendor_id\t: {vendor}\nflags\t: {flags}\n\nvendor_id\t: other\n")
    assert is_amd_avx512(tmp_path / "cpuinfo") is expected
    assert not is_amd_avx512(tmp_path / "absent")
