"""Every family of vision transformers that people publish gives the same numbers as ours, under its library's names."""

from functools import partial

import pytest
import torch
from others import real_timm
from torch.nn import functional as F
from tower_parts import quick_gelu, swiglu, swiglu_packed
from towers import HuggingFaceDinov2, HuggingFaceTower, HuggingFaceViT, OpenClip, Timm, Torchvision

from softmoe.convert import from_timm, to_timm

HALF = {"heads": 2, "mean": 0.5, "std": 0.5}
tanh_gelu = partial(F.gelu, approximate="tanh")
FAMILIES = {
    "AugReg, DeiT": (Timm, {}),
    "DeiT-III": (partial(Timm, layer_scale=True, rows=0), {}),
    "MAE, fine-tuned with mean pooling": (partial(Timm, pool="avg", fc_norm=True), {}),
    "class token, mean pooling before the last norm's end": (partial(Timm, pool="avg"), {"pool": "mean"}),
    "no class token": (partial(Timm, pool="avg", class_token=False, rows=0), {}),
    "registers without a class token": (partial(Timm, pool="avg", class_token=False, registers=4, rows=0), {}),
    "registers with positions": (partial(Timm, registers=3, rows=4), {"image_size": 12}),
    "SigLIP in timm": (
        partial(Timm, pool="map", class_token=False, rows=0, act=tanh_gelu),
        {"activation": "gelu_tanh"},
    ),
    "attention pooling past a class token": (partial(Timm, pool="map"), {}),
    "CLIP in timm, OpenAI's": (partial(Timm, norm_pre=True, act=quick_gelu, eps=1e-5), {"activation": "quick_gelu"}),
    "CLIP in timm, LAION's": (partial(Timm, norm_pre=True, eps=1e-5), {"activation": "gelu"}),
    "DINOv2 as published": (partial(Timm, layer_scale=True, mask_token=True, classes=None), {}),
    "DINOv2 with registers as published": (
        partial(Timm, layer_scale=True, mask_token=True, classes=None, registers=4, register_name="register_tokens"),
        {},
    ),
    "DINOv2 with registers in timm": (partial(Timm, layer_scale=True, classes=None, registers=4, rows=0), {}),
    "Hugging Face ViT": (HuggingFaceViT, {"norm_eps": 1e-12}),
    "Hugging Face ViT with pooler": (partial(HuggingFaceViT, pooler=True), {"norm_eps": 1e-12}),
    "Hugging Face DINOv2": (HuggingFaceDinov2, {}),
    "Hugging Face DINOv2 in memory": (partial(HuggingFaceDinov2, memory=True), {}),
    "Hugging Face DINOv2 with registers": (partial(HuggingFaceDinov2, registers=4), {}),
    "Hugging Face SigLIP": (partial(HuggingFaceTower, clip=False, act=tanh_gelu), {"activation": "gelu_tanh"}),
    "Hugging Face CLIP": (partial(HuggingFaceTower, clip=True, act=quick_gelu), {"activation": "quick_gelu"}),
    "open_clip": (OpenClip, {"activation": "gelu"}),
    "open_clip with layer scales": (partial(OpenClip, layer_scale=True), {"activation": "gelu"}),
    "torchvision": (Torchvision, {}),
}
IMAGES = torch.randn(3, 3, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_function(family: str):
    """A plain forward pass under the library's own names and ours give the same output, in float64."""
    make, options = FAMILIES[family]
    plain = make()
    model = from_timm(plain.state_dict(), **HALF, **options).eval()
    torch.testing.assert_close(model(IMAGES), plain(IMAGES), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("family", [name for name in FAMILIES if FAMILIES[name][0] is not HuggingFaceViT])
def test_back_under_timms_names(family: str):
    """What was read can be written under timm's names and read again: the same function, and timm's sizes."""
    make, options = FAMILIES[family]
    model = from_timm(make().state_dict(), **HALF, **options).eval()
    if model.config.representation_size:
        with pytest.raises(ValueError, match="no tanh layer"):
            to_timm(model)
        return
    tensors, arguments = to_timm(model)
    told = {"pool": model.config.pool, "activation": model.config.activation, "norm_eps": model.config.norm_eps}
    again = from_timm(tensors, **HALF, image_size=12, **told).eval()
    assert again.config == model.config
    torch.testing.assert_close(again(IMAGES), model(IMAGES), rtol=1e-12, atol=1e-12)
    assert (arguments["embed_dim"], arguments["depth"], arguments["num_heads"]) == (16, 2, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_timm_itself(family: str):
    """timm's own class, made with the arguments, takes the tensors strictly and gives the same output."""
    timm = real_timm()
    make, options = FAMILIES[family]
    pixels = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    model = from_timm(make().state_dict(), **(HALF | pixels), **options).eval()
    if model.config.representation_size:
        pytest.skip("timm has no tanh layer before the head")
    tensors, arguments = to_timm(model)
    theirs = timm.models.vision_transformer.VisionTransformer(**arguments).double().eval()
    theirs.load_state_dict(tensors)
    torch.testing.assert_close(theirs(IMAGES), model(IMAGES), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (Timm(make_mlp=swiglu_packed), "gated MLPs .SwiGLU. .blocks.0.mlp.w12.weight"),
        (Timm(make_mlp=partial(swiglu_packed, "fc1", "fc2")), "gated MLPs .SwiGLU., which"),
        (Timm(make_mlp=swiglu), "gated MLPs .SwiGLU. .blocks.0.mlp.gate_proj.weight"),
        (HuggingFaceDinov2(gated=True), "gated MLPs"),
    ],
)
def test_gated_towers_are_refused_with_the_way_out(model, what):
    """What it is, and what to do: experts are put into the model in place."""
    with pytest.raises(ValueError, match=what + r".*softmoe\.upcycle_\(model"):
        from_timm(model.state_dict(), **HALF)


def test_no_positions_and_double_heads_are_refused():
    """Rotary positions (DINOv3) leave no table; DINOv2's classifier reads class token and mean together."""
    state = Timm().state_dict()
    del state["pos_embed"]
    with pytest.raises(ValueError, match=r"no learned positions .* DINOv3, .*softmoe\.upcycle_"):
        from_timm(state, **HALF)
    with pytest.raises(ValueError, match="class token and mean together"):
        from_timm(HuggingFaceDinov2().state_dict() | {"classifier.weight": torch.zeros(5, 32)}, **HALF)


def test_what_cannot_be_told_is_asked_for():
    """Mean and std, CLIP's activation, and a pooling without its parts: one sentence each."""
    state = Timm().state_dict()
    for missing in ("mean", "std"):
        with pytest.raises(ValueError, match="which mean and std of the pixels"):
            from_timm(state, **{name: value for name, value in HALF.items() if name != missing})
    with pytest.raises(ValueError, match="give activation"):
        from_timm(Timm(norm_pre=True).state_dict(), **HALF)
    with pytest.raises(ValueError, match="no parts for pooling by 'attention'"):
        from_timm(state, **HALF, pool="attention")


@pytest.mark.parametrize(("width", "heads"), [(1280, 16), (1152, 16), (192, 3)])
def test_heads_of_wide_models(width: int, heads: int):
    """H and so400m have heads of 80 and 72 numbers: the width over 64 would be silently wrong."""
    state = {
        name: torch.zeros(shape)
        for name, shape in {
            "patch_embed.proj.weight": (width, 3, 1, 1),
            "pos_embed": (1, 4, width),
            "norm.weight": (width,),
            "norm.bias": (width,),
            **{f"blocks.0.norm{i}.{kind}": (width,) for i in (1, 2) for kind in ("weight", "bias")},
            "blocks.0.attn.qkv.weight": (3 * width, width),
            "blocks.0.attn.proj.weight": (width, width),
            "blocks.0.mlp.fc1.weight": (1, width),
            "blocks.0.mlp.fc2.weight": (width, 1),
        }.items()
    }
    assert from_timm(state, mean=0.5, std=0.5).config.heads == heads
