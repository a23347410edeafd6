"""`prepare` gives the same model, from weights of fewer bits, and refuses what it would get wrong."""

import copy

import pytest
import torch
from saved_models import tiny
from torch import nn

from softmoe.accelerate.activation import KERNEL, CompiledGELU
from softmoe.inference import layers, prepare
from softmoe.inference.layers import PreparedExperts, PreparedSoftRouter, round_to
from softmoe.moe import Experts, MoE, SoftMoE, SoftRouter

BYTES = pytest.param("int8_dynamic", marks=pytest.mark.skipif(not layers.has_bytes(), reason="no product of bytes"))
WEIGHTS = ("float32", "float16", "bfloat16", "int8", BYTES)
TOLERANCE = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 1e-2, "int8": 3e-2, "int8_dynamic": 6e-2}
"""Of the outputs' root mean square, for random weights."""
ROUTERS = ("soft", "placed", "tokens_choice", "experts_choice", "identity", "uniform", "soft_uniform", "uniform_soft")


def distance(ours: torch.Tensor, plain: torch.Tensor) -> float:
    return float((ours - plain).norm() / plain.norm())


def changed(model: nn.Module) -> nn.Module:
    """Biases and scales away from their first values."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("b1", "b2", "bias", "scale")):
                parameter += torch.randn_like(parameter)
    return model.eval()


@pytest.fixture(params=[True, False], ids=["compiled", "torch"])
def _both(request, monkeypatch):
    """With the compiled product and without it."""
    if not request.param:
        monkeypatch.setattr(layers.KERNEL, "_found", "not asked for")
        if request.node.callspec.params.get("weights") == "int8_dynamic":
            pytest.skip("only compiled")
    elif not layers.KERNEL.available:
        pytest.skip(str(layers.KERNEL.why_not()))


@pytest.mark.usefixtures("_both")
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("router", ROUTERS)
def test_every_router(router, weights):
    """Whole models with any router: outputs equal the plain model's within the rounding of the weights."""
    model = changed(tiny(f"{router}_ti8_4e", dropout=0.1, mlp_dim=80))
    images = torch.randn(3, 3, 32, 32)
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        ours, plain = prepare(model, weights)(images), model(images)
    assert distance(ours, plain) < TOLERANCE[weights]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.usefixtures("_both")
@pytest.mark.parametrize("weights", WEIGHTS)
def test_experts_beside_an_mlp(weights):
    """A model whose MLPs are kept beside narrow experts: the same outputs, also while the experts give zero."""
    fresh = tiny("soft_ti8_4e", mlp_dim=80, expert_dim=12, keep_mlp=True).eval()
    images = torch.randn(3, 3, 32, 32)
    for model in (fresh, changed(copy.deepcopy(fresh))):
        with torch.no_grad():
            assert distance(prepare(model, weights)(images), model(images)) < TOLERANCE[weights]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_layer_shapes_and_masks(weights):
    """The layer alone takes tokens with a mask, vectors and feature maps, as before."""
    layer = changed(SoftMoE(8, 4, 2, hidden_dim=12))
    prepared = prepare(layer, weights)
    mask = torch.rand(2, 9) < 0.6
    with torch.no_grad():
        for arguments in ((torch.randn(2, 9, 8), mask), (torch.randn(5, 8),), (torch.randn(2, 8, 3, 3),)):
            ours, plain = prepared(*arguments), layer(*arguments)
            assert ours.shape == plain.shape
            assert distance(ours, plain) < TOLERANCE[weights]


@pytest.mark.parametrize("normalize", [True, False])
def test_folded_router(normalize):
    """Slot vectors folded once give the same weights, in float64 to the last digits but a few."""
    router = SoftRouter(6, 3, 2, normalize=normalize, noise_std=1.0).double().eval()
    x, mask = torch.randn(2, 7, 6, dtype=torch.float64), torch.rand(2, 7) < 0.7
    ours, plain = PreparedSoftRouter(router)(x, mask), router(x, mask)
    torch.testing.assert_close(ours.dispatch_weights, plain.dispatch_weights, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(ours.combine_weights, plain.combine_weights, rtol=1e-12, atol=1e-14)


def test_the_rest_is_accelerated():
    """What prepare does not replace, such as the GELU between two products, is the fast form of this processor."""
    if KERNEL.why_not():
        pytest.skip("no compiled GELU here")
    prepared = prepare(SoftMoE(32, 4).eval())
    assert [type(m) for m in prepared.modules() if isinstance(m, nn.GELU)] == [CompiledGELU]


def test_inside_another_model():
    """A layer inside somebody's own module is found and replaced; the rest is copied."""
    model = nn.Sequential(nn.Linear(5, 8), SoftMoE(8, 4, 1), nn.Linear(8, 2)).eval()
    prepared = prepare(model, "int8")
    assert isinstance(prepared[1].experts, PreparedExperts)
    assert prepared[0].weight.data_ptr() != model[0].weight.data_ptr()
    x = torch.randn(3, 6, 5)
    with torch.no_grad():
        assert distance(prepared(x), model(x)) < TOLERANCE["int8"]


@pytest.mark.parametrize(("weights", "share"), [("float32", 1.0), ("float16", 0.5), ("bfloat16", 0.5), ("int8", 0.25)])
def test_smaller(weights, share):
    """Experts take the promised share of the memory, up to scales and biases."""
    layer = SoftMoE(64, 4, 1, hidden_dim=256).eval()
    plain = sum(t.nbytes for t in (layer.experts.w1, layer.experts.w2))
    packed = PreparedExperts(layer.experts, weights)
    assert packed.first.packed.nbytes + packed.second.packed.nbytes == share * plain


def test_int8_scales():
    """One scale per expert and output; the largest weight is exact to rounding; a dead output stays zero."""
    w = torch.randn(6, 5) * torch.tensor([1e-3, 1.0, 1e3, 0.0, 1e-45])
    rounded, scale = round_to(w, torch.int8)
    assert scale is not None
    assert rounded.abs().amax(0)[:4].tolist() == [127, 127, 127, 0]
    assert ((rounded * scale - w).abs() <= scale / 2 + 1e-9).all()


def test_mapped_weights_stay_where_they_are():
    """Without copying, experts and all other weights are the same memory."""
    model = tiny()
    prepared = prepare(model, copy_weights=False)
    assert {p.data_ptr() for p in prepared.parameters()} <= {p.data_ptr() for p in model.parameters()}
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(prepared(images), model(images))


class OtherExperts(Experts):
    def forward(self, x_NSD):
        return 2 * super().forward(x_NSD)


class OtherRouter(SoftRouter):
    pass


def nan_expert() -> nn.Module:
    layer = SoftMoE(4, 3, 1).eval()
    layer.experts.w2.data[1, 0, 0] = float("nan")
    return layer


def nan_norm() -> nn.Module:
    model = tiny()
    model.encoder.norm.weight.data[3] = float("inf")
    return model


def large() -> nn.Module:
    layer = SoftMoE(4, 3, 1).eval()
    layer.experts.w1.data[2, 0, 0] = 1e6
    return layer


def hooked() -> nn.Module:
    layer = SoftMoE(4, 3, 1).eval()
    layer.experts.register_forward_hook(lambda *_: None)
    return layer


@pytest.mark.parametrize(
    ("make", "weights", "message"),
    [
        (lambda: SoftMoE(4, 3, 1), "int8", r"call model.eval\(\)"),
        (lambda: tiny().double(), "int8", r"float64; .* call model.float\(\)"),
        (lambda: MoE(SoftRouter(4, 3), OtherExperts(4, 8, 3)).eval(), "int8", "experts of type OtherExperts"),
        (lambda: MoE(OtherRouter(4, 3), Experts(4, 8, 3)).eval(), "int8", "router is a OtherRouter"),
        (lambda: MoE(SoftRouter(4, 3), nn.Identity()).eval(), "float32", "experts of type Identity"),
        (nan_expert, "int8", "experts cannot be prepared: it has weights that are not finite"),
        (nan_norm, "float32", "encoder.norm.weight has values that are not finite"),
        (large, "float16", r"weights up to 1e\+06, which float16 cannot hold"),
        (hooked, "int8", "experts has hooks"),
        (lambda: tiny("vit_ti8"), "int8", "no experts"),
        (lambda: tiny(), "int4", "weights must be one of float32, float16, bfloat16, int8, int8_dynamic"),
        (lambda: tiny().to("meta"), "int8", "meta device"),
    ],
)
def test_refused(make, weights, message):
    """What would be silently wrong is one sentence instead."""
    with pytest.raises(ValueError, match=message) as caught:
        prepare(make(), weights)
    assert "\n" not in str(caught.value)


def test_a_bad_fit_is_refused(monkeypatch):
    """If experts come out different, whatever the reason, prepare says by how much and where."""
    monkeypatch.setitem(__import__("softmoe.inference.prepared", fromlist=["x"]).LARGEST_ERROR, "int8", 1e-4)
    with pytest.raises(ValueError, match=r"would change the outputs of expert \d in experts by .*%; use more bits"):
        prepare(SoftMoE(16, 3, 1).eval(), "int8")


def test_no_gradients():
    """A backward pass through rounded weights would end in the middle without a word."""
    prepared = prepare(SoftMoE(4, 3, 1).eval(), "int8")
    with pytest.raises(ValueError, match="gives no gradients"):
        prepared(torch.randn(1, 5, 4, requires_grad=True))
