"""Experts in anybody's model, in place: what it computes at first, and that it can be saved and made again."""

import copy
import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from others import real_timm, real_transformers
from torch import Tensor, nn
from torch.nn import functional as F
from tower_parts import Box, Call, mlp, packed_attention, quick_gelu, randomize, swiglu, swiglu_packed
from towers import HuggingFaceDinov2, HuggingFaceTower, HuggingFaceViT, OpenClip, Timm, Torchvision

import softmoe
from softmoe.moe import Experts, ExpertsBeside, MoE
from softmoe.moe.record import record
from softmoe.transfer.in_place import upcycle_
from softmoe.transfer.mlps import GatedExperts, read_mlp

IMAGES = torch.randn(6, 3, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
MODELS = {
    "timm": (Timm, "blocks.*.mlp"),
    "rotary positions": (partial(Timm, attention=lambda: rotary_attention()), "blocks.*.mlp"),
    "timm with packed SwiGLU": (partial(Timm, make_mlp=partial(swiglu_packed, "fc1", "fc2")), "blocks.*.mlp"),
    "DINOv2 giant as published": (partial(Timm, make_mlp=swiglu_packed), "blocks.*.mlp"),
    "gate, up and down": (partial(Timm, make_mlp=swiglu), "blocks.*.mlp"),
    "Hugging Face ViT, split MLPs": (HuggingFaceViT, "vit.encoder.layer.*"),
    "Hugging Face DINOv2": (partial(HuggingFaceDinov2, registers=4), "encoder.layer.*.mlp"),
    "Hugging Face DINOv2 giant": (partial(HuggingFaceDinov2, gated=True), "layer.*.mlp"),
    "Hugging Face SigLIP": (partial(HuggingFaceTower, clip=False, act=F.gelu), "layers.*.mlp"),
    "CLIP": (partial(HuggingFaceTower, clip=True, act=quick_gelu), "layers.*.mlp"),
    "open_clip": (OpenClip, "resblocks.*.mlp"),
    "torchvision": (Torchvision, "encoder_layer_*.mlp"),
}


def rotary_attention() -> Call:
    """Queries and keys turned by the token's place: DINOv3's kind, which our own models do not have."""

    def forward(self: Call, x: Tensor) -> Tensor:
        query, key, value = self.inner.qkv(x).chunk(3, dim=-1)
        angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * torch.linspace(0.1, 1.0, 8, dtype=x.dtype)

        def turn(part: Tensor) -> Tensor:
            a, b = part.chunk(2, dim=-1)
            return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1)

        return self.inner.proj(F.scaled_dot_product_attention(turn(query), turn(key), value))

    return Call(forward, inner=packed_attention())


def layers(model: nn.Module) -> list[MoE]:
    return [module for module in model.modules() if isinstance(module, MoE)]


@pytest.mark.parametrize("name", MODELS)
def test_beside_changes_nothing_at_first(name: str):
    """With experts beside every MLP the output is the old one, bit for bit, and experts can learn."""
    make, mlps = MODELS[name]
    model = make()
    before = model(IMAGES)
    report = upcycle_(model, mlps, experts=4, slots=2, batches=IMAGES)
    assert torch.equal(model(IMAGES), before)
    assert (report.moved, report.same_class, report.images, len(report.modules)) == (0.0, 1.0, 6, 2)
    assert all(isinstance(layer, ExpertsBeside) for layer in layers(model))
    model(IMAGES).square().sum().backward()
    assert all(layer.experts.w2.grad.abs().sum() > 0 for layer in layers(model))


@pytest.mark.parametrize("name", MODELS)
def test_copies_compute_the_old_function_where_nothing_is_mixed(name: str):
    """N copies of each MLP, recognized by its numbers; the identity router gives each token to one of them."""
    make, mlps = MODELS[name]
    model = make()
    before = model(IMAGES)
    report = upcycle_(model, mlps, experts=3, init="copy", router="identity", batches=IMAGES)
    torch.testing.assert_close(model(IMAGES), before, rtol=1e-9, atol=1e-9)
    assert report.moved is not None
    assert report.moved < 1e-9
    gated = "giant" in name or "gate" in name or "SwiGLU" in name
    assert all(isinstance(layer.experts, GatedExperts if gated else Experts) for layer in layers(model))


@pytest.mark.parametrize("init", ["beside", "copy", "closest"])
@pytest.mark.parametrize("name", ["timm", "DINOv2 giant as published", "Hugging Face ViT, split MLPs"])
def test_the_same_structure_again_without_data(name: str, init: str):
    """The report's config through json makes a fresh model take the saved state: the same output."""
    make, mlps = MODELS[name]
    model = make()
    report = upcycle_(model, mlps, experts=3, init=init, batches=IMAGES, blocks="last_half", scale_init=2.0)
    assert len(report.modules) == 1
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    fresh = make()
    upcycle_(fresh, **json.loads(json.dumps(report.config)))
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(IMAGES), model(IMAGES))


def test_routers_start_from_the_tokens():
    """Copies with the start "closest" are nearer to the old output than with fresh routers; beside an MLP slots begin
    to tell tokens apart."""
    torch.manual_seed(0)
    plain = Timm()
    found = {
        init: upcycle_(copy.deepcopy(plain), experts=9, init=init, blocks=[1], batches=[IMAGES[:3], IMAGES[3:]]).moved
        for init in ("copy", "centers", "closest")
    }
    assert found["closest"] < found["centers"] < found["copy"]
    sharp = {}
    for batches in (None, IMAGES):
        model = copy.deepcopy(plain)
        upcycle_(model, experts=9, batches=batches)
        with record(model) as recording:
            model(IMAGES)
        weights = [routing.dispatch_weights.amax(1).mean() for routing in recording.routings.values()]
        sharp[batches is not None] = float(torch.stack(weights).mean().detach())
    assert sharp[True] > 2 * sharp[False]


def test_shapes():
    """Vectors, grids of tokens, and tokens before the batch (found out from batches): the same as (B, M, D)."""
    x = torch.randn(4, 6, 16, dtype=torch.float64)
    net = Box(mlp=randomize(mlp()))
    upcycle_(net, "mlp", experts=3, init="copy")
    y = net.mlp(x)
    assert torch.equal(net.mlp(x.unflatten(1, (2, 3))), y.unflatten(1, (2, 3)))
    assert torch.equal(net.mlp(x[:, 0]), net.mlp(x[:, :1])[:, 0])
    assert torch.equal(net.mlp(hidden_states=x), y)
    turned = Call(lambda self, images: self.mlp(images.transpose(0, 1)).transpose(0, 1), mlp=randomize(mlp()))
    report = upcycle_(turned, "mlp", experts=3, init="copy", batches=[(x, None)])
    assert report.config["tokens_first"]
    torch.testing.assert_close(turned(x)[:1], turned(x[:1]))  # images do not mix


def test_mappings_and_outputs_of_several():
    """Hugging Face's calling convention: a mapping in, a mapping with logits out; batches may be an endless stream."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Timm()

        def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
            return {"hidden": pixel_values, "logits": self.net(pixel_values)}

    model = Wrapped()
    endless = iter(lambda: {"pixel_values": IMAGES}, None)
    report = upcycle_(model, experts=4, batches=endless)
    assert (report.moved, report.images) == (0.0, 48)
    assert report.modules == ("net.blocks.0.mlp", "net.blocks.1.mlp")


def test_the_report_counts():
    """Multiply-accumulates and parameters by hand; the text names modules and says what moved."""
    model = Timm()
    before = sum(p.numel() for p in model.parameters())
    report = upcycle_(model, experts=4, slots=2, expert_dim=3, batches=IMAGES, blocks=[1])
    M, D, H, S, R = 10, 16, 24, 8, 3
    assert report.macs == (M * 2 * D * H + 3 * M * S * D + 2 * S * R * D) / (M * 2 * D * H)
    added = 4 * (2 * D * R + R + D) + D * S + 1
    assert report.params == (before + added) / before
    text = str(report)
    assert "4 experts with 2 slots each beside 1 modules: blocks.1.mlp" in text
    assert "moved by 0.0000" in text
    assert "give batches=" in str(upcycle_(Timm(), experts=2))
    names = tuple("abcde")
    assert str(replace(report, modules=names[:4])).splitlines()[0].endswith(" 4 modules: a, b, c, d")
    assert str(replace(report, modules=names)).splitlines()[0].endswith(" 5 modules: a, b, c, ... e")


def test_modes_types_and_hooks_stay():
    """Training mode and precision are the model's own, and no hook is left."""
    model = Timm().float().train()
    upcycle_(model, experts=2, batches=IMAGES.float())
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert all(module.training for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())
    with torch.device("meta"):
        empty = nn.Sequential(mlp())
    upcycle_(empty, "0", experts=2)
    assert all(parameter.is_meta for parameter in empty.parameters())


def test_half_precision_of_our_own_models():
    """softmoe.upcycle takes them too, and routers do not start at random."""
    torch.manual_seed(0)
    dense = softmoe.create_model("vit_ti16", num_classes=5, image_size=32, depth=2).bfloat16()
    images = (torch.rand(4, 3, 32, 32) * 2 - 1).bfloat16()
    start = softmoe.upcycle(dense, 4, images=images, init="positions")
    assert {parameter.dtype for parameter in start.model.parameters()} == {torch.bfloat16}
    assert start.distance.features < softmoe.upcycle(dense, 4, images=images, init="copy").distance.features


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: upcycle_(Timm(), "block.*.mlp"), r"matches no module of this Timm; close names are blocks\.\*\.mlp"),
        (lambda: upcycle_(HuggingFaceViT(), "vit.layers.*.mlp"), r"close names are vit\.encoder\.layer\.\*"),
        (lambda: upcycle_(upcycle_(Timm()).model), "blocks.0.mlp has experts already"),
        (lambda: upcycle_(Timm(), init="closest"), "give batches="),
        (lambda: upcycle_(Timm(), init="best"), "init must be one of beside, copy"),
        (lambda: upcycle_(Timm(), blocks=[7]), "indices of the 2 matches"),
        (lambda: upcycle_(Timm(), "blocks.*.norm1"), "without a linear layer"),
        (lambda: upcycle_(Timm(), init="copy", expert_dim=3), "leave out expert_dim"),
        (lambda: upcycle_(Timm(make_mlp=odd_mlp), init="copy"), "blocks.0.mlp, a Call, is neither .* init='beside'"),
        (lambda: upcycle_(Timm(), scale=3), "unknown option 'scale'"),
    ],
)
def test_mistakes(call, words):
    """One sentence that says what to do."""
    with pytest.raises(ValueError, match=words):
        call()


def odd_mlp() -> Call:
    return mlp(act=torch.tanh)


def test_activations_are_told_apart():
    """Forms of GELU differ in the fourth digit; each is recognized."""
    for name, act in (("gelu", F.gelu), ("gelu_tanh", partial(F.gelu, approximate="tanh")), ("quick_gelu", quick_gelu)):
        assert read_mlp(randomize(mlp(act=act)).float(), "x").activation == name
    assert read_mlp(randomize(swiglu()), "x").activation == "silu"


@pytest.mark.parametrize("make", [mlp, swiglu])
def test_experts_drop_out_as_their_mlp_does(make):
    """In training and only there, gated or not."""
    module = nn.Sequential(randomize(make()), nn.Dropout(0.25))
    with torch.no_grad():
        experts, x_NSD = read_mlp(module, "x").copies(2), torch.randn(2, 400, 16, dtype=torch.float64)
    assert (experts.double()(x_NSD) == 0).double().mean().item() == pytest.approx(0.25, abs=0.03)
    assert not (experts.eval()(x_NSD) == 0).any()


def test_public_name():
    """softmoe.upcycle_."""
    assert softmoe.upcycle_ is upcycle_


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch16_dinov3", "eva02_tiny_patch14_224"])
def test_timm_itself(name: str):
    """timm's own models, rotary positions and gated MLPs among them."""
    timm = real_timm()
    model = timm.create_model(name, img_size=112, depth=2, num_classes=7).eval()
    images = torch.randn(2, 3, 112, 112)
    before = model(images)
    report = upcycle_(model, "blocks.*.mlp", experts=4, batches=images)
    assert torch.equal(model(images), before)
    assert len(report.modules) == 2


@pytest.mark.filterwarnings("ignore")  # of the packages that transformers loads where they are installed
@pytest.mark.parametrize(("kind", "mlps"), [("Dinov2", "layer.*.mlp"), ("DINOv3ViT", "layer.*.mlp"), ("ViT", None)])
def test_transformers_itself(kind: str, mlps: str | None, monkeypatch: pytest.MonkeyPatch):
    """Hugging Face's own models; its ViT by either of its structures."""
    transformers = real_transformers(monkeypatch)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 12, "patch_size": 4}
    model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**sizes)).eval()
    if mlps is None:
        mlps = "layers.*.mlp" if hasattr(model, "layers") else "encoder.layer.*"
    images = IMAGES.float()
    before = model(images).last_hidden_state
    report = upcycle_(model, mlps, experts=4, batches={"pixel_values": images})
    assert torch.equal(model(images).last_hidden_state, before)
    assert len(report.modules) == 2
