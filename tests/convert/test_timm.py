"""Tensors in timm's naming: the same function as the model they came from."""

import numpy as np
import pytest
import torch
from convert.plain import PlainViT, timm_names
from safetensors.torch import save_file

from softmoe.convert import from_timm


def check_equal(plain: PlainViT, model: torch.nn.Module) -> None:
    images = torch.randn(2, 3, *plain.image_size, dtype=torch.float64)
    torch.testing.assert_close(model(images), plain(images), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("pool", ["class", "mean", "attention"])
@pytest.mark.parametrize("gelu", ["none", "tanh"])
def test_outputs_are_equal(pool, gelu):
    """Every pool; the exact GELU by default, the tanh one on request."""
    plain = PlainViT(pool, gelu)
    options = {"activation": "gelu_tanh"} if gelu == "tanh" else {}
    model = from_timm(timm_names(plain), mean=0.5, std=0.5, heads=2, **options)
    assert model.config.pool == pool
    check_equal(plain, model)


@pytest.mark.parametrize("ending", ["safetensors", "npz"])
def test_files(ending, tmp_path):
    """A safetensors file and an .npz are read the same; a class token may have no position; a tanh layer."""
    plain = PlainViT(gelu="none", class_position=False, representation=6)
    path = tmp_path / f"model.{ending}"
    state = timm_names(plain)
    if ending == "npz":
        np.savez(path, **{name: value.numpy() for name, value in state.items()})
    else:
        save_file({name: value.contiguous() for name, value in state.items()}, path)
    check_equal(plain, from_timm(path, mean=0.5, std=0.5, heads=2))


def test_layer_scales_and_missing_biases():
    """Layer scales are kept as they are; a missing bias is zero."""
    plain = PlainViT(gelu="none")
    for block in plain.blocks:
        block.gamma1, block.gamma2 = torch.randn(2, 16, dtype=torch.float64)
        torch.nn.init.zeros_(block.attention.in_proj_bias)
    state = {name: value for name, value in timm_names(plain).items() if not name.endswith("qkv.bias")}
    check_equal(plain, from_timm(state, mean=0.5, std=0.5, heads=2))


@pytest.mark.parametrize("lost", ["blocks.1.attn.qkv.bias", "blocks.0.mlp.fc1.bias"])
def test_a_bias_that_one_block_lacks(lost: str):
    """A bias that other blocks have was lost: it is named, not taken for zero."""
    state = timm_names(PlainViT())
    del state[lost]
    with pytest.raises(ValueError, match=f"{lost} is missing, which other blocks"):
        from_timm(state, mean=0.5, std=0.5, heads=2)


def test_pixels_are_folded_into_the_patches():
    """Trained on (pixel - mean) / std: the converted model gives the same for the image in [-1, 1]."""
    plain = PlainViT(gelu="none")
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    model = from_timm(timm_names(plain), heads=2, mean=mean, std=std)
    pixels = torch.rand(2, 3, 12, 12, dtype=torch.float64)
    theirs = (pixels - torch.tensor(mean).view(3, 1, 1).double()) / torch.tensor(std).view(3, 1, 1).double()
    torch.testing.assert_close(model(pixels * 2 - 1), plain(theirs), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("mean", "std"), [(127.5, 0.5), (0.5, (58.4, 57.1, 57.4)), (-1, 0.5)])
def test_pixels_of_another_range_are_refused(mean, std):
    """A mean and deviation of pixels up to 255 are no silent loss of accuracy."""
    with pytest.raises(ValueError, match="those of pixels from 0 to 1"):
        from_timm(timm_names(PlainViT()), heads=2, mean=mean, std=std)


def test_heads():
    """Width over 64, or what the norms of queries and keys tell, or asked for."""
    wide = PlainViT(dim=128, heads=2, hidden=8, depth=1)
    assert from_timm(timm_names(wide), mean=0.5, std=0.5).config.heads == 2
    state = timm_names(PlainViT())
    with pytest.raises(ValueError, match="heads cannot be told from the tensors of width 16"):
        from_timm(state, mean=0.5, std=0.5)
    norms = {
        f"blocks.{i}.attn.{part}_norm.{kind}": torch.full((4,), value, dtype=torch.float64)
        for i in range(2)
        for part in "qk"
        for kind, value in (("weight", 1.5), ("bias", 0.0))
    }
    model = from_timm(state | norms, mean=0.5, std=0.5)
    assert (model.config.heads, model.config.qk_norm) == (4, True)
    assert torch.equal(model.encoder.blocks[1].attention.key_norm.weight, torch.full((4,), 1.5, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"key_norm.bias is not zero"):
        from_timm(state | norms | {"blocks.1.attn.k_norm.bias": torch.ones(4)}, mean=0.5, std=0.5)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("dist_token", "a distillation token"),
        ("patch_embed.backbone.conv1.weight", "a convolutional network below"),
        ("blocks.0.attn.rel_pos.weight", "relative positions"),
        ("blocks.0.attn.gate.weight", "unexpected encoder.blocks.0.attention.gate.weight"),
    ],
)
def test_what_ours_lacks_is_refused(name, what):
    """Parts without a counterpart are named, never dropped."""
    with pytest.raises(ValueError, match=what):
        from_timm(timm_names(PlainViT()) | {name: torch.zeros(16)}, mean=0.5, std=0.5, heads=2)


def test_other_files_are_refused(tmp_path):
    """Not timm's names; a pickle that calls itself safetensors."""
    with pytest.raises(ValueError, match="in timm's naming"):
        from_timm({"fc.weight": torch.zeros(2, 2)})
    torch.save({"blocks.0.attn.qkv.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="is not a readable safetensors file"):
        from_timm(tmp_path / "model.safetensors")
