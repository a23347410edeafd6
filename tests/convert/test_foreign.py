"""Files and folders of other people's models: what is written beside the weights is read, the rest is asked for."""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from tower_parts import quick_gelu
from towers import HuggingFaceDinov2, HuggingFaceTower, HuggingFaceViT, OpenClip, Timm

from softmoe import save_pretrained
from softmoe.convert import foreign
from softmoe.convert.foreign import from_pretrained, from_timm_config, open_foreign
from softmoe.models import VisionTransformer

IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
tanh_gelu = partial(F.gelu, approximate="tanh")
TIMM: dict[str, Any] = {
    "architecture": "vit_tiny_patch4_12",
    "num_classes": 5,
    "global_pool": "token",
    "pretrained_cfg": {"input_size": [3, 12, 12], "crop_pct": 0.8, "mean": IMAGENET[0], "std": IMAGENET[1]},
    "model_args": {"num_heads": 2},
}
PIXELS = {"image_mean": IMAGENET[0], "image_std": IMAGENET[1], "size": {"height": 12, "width": 12}}
SIZES = {"num_attention_heads": 2, "image_size": 12}


def write(folder: Path, model: torch.nn.Module, file: str = "model.safetensors", **configs: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, folder / file)
    for name, values in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return folder


def check(plain: torch.nn.Module, folder: Path, **options: Any) -> Any:
    """The folder's model on images in [-1, 1] is the plain one on normalized pixels."""
    found = open_foreign(folder, **options)
    assert found is not None
    pixels = torch.rand(2, 3, 12, 12, dtype=torch.float64)
    mean, std = (torch.tensor(values, dtype=torch.float64).view(3, 1, 1) for values in IMAGENET)
    torch.testing.assert_close(found.model(pixels * 2 - 1), plain((pixels - mean) / std), rtol=1e-9, atol=1e-9)
    return found


def test_timm_folder(tmp_path: Path):
    """Heads, pooling, crop, mean and std from config.json, whose pretrained_cfg may lie open."""
    plain = Timm()
    found = check(plain, write(tmp_path / "a", plain, config=TIMM))
    assert (found.preprocessing.image_size, found.preprocessing.central_ratio) == ((12, 12), 1.25)
    opened = {**TIMM, **TIMM["pretrained_cfg"]}
    del opened["pretrained_cfg"]
    check(plain, write(tmp_path / "b", plain, config=opened))
    mean = Timm(pool="avg")
    check(mean, write(tmp_path / "c", mean, config=TIMM | {"global_pool": "avg"}))
    check(plain, tmp_path / "a" / "model.safetensors")  # the file in its folder


def test_hashed_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Opening hashes nothing; the fingerprint does, once for a file however often it is opened."""
    plain, hashed = Timm(), []
    monkeypatch.setattr(foreign, "sha256", lambda path: hashed.append(path.parent.name) or f"hash of {path}")
    folders = [write(tmp_path / name, plain, config=TIMM) for name in "ab"]
    first, again, other = opened = [open_foreign(folder) for folder in (folders[0], *folders)]
    assert None not in opened
    assert hashed == []
    assert first.fingerprint == again.fingerprint != other.fingerprint  # pyright: ignore[reportOptionalMemberAccess]
    assert hashed == ["a", "b"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pretrained_cfg": TIMM["pretrained_cfg"] | {"crop_pct": float("nan")}}, "crop_pct is from"),
        ({"pretrained_cfg": TIMM["pretrained_cfg"] | {"crop_pct": -1}}, "crop_pct is from"),
        ({"model_args": {"num_heads": True}}, "num_heads is from"),
        ({"label_names": ["\x1b[2J", "b", "c", "d", "e"]}, "control characters"),
        ({"model_args": {"num_heads": 2, "act_layer": "relu"}}, "vit_tiny_patch4_12 uses the activation 'relu'"),
        ({"pretrained_cfg": {"input_size": [3, 12, 12]}}, "do not say which mean and std"),
    ],
)
def test_settings_that_no_model_has(change, words, tmp_path: Path):
    """Numbers out of their range are not rounded to something in silence, and names do nothing to a terminal."""
    folder = write(tmp_path / "a", Timm(), config=TIMM | change)
    with pytest.raises(ValueError, match=words):
        open_foreign(folder)


def test_a_size_of_three_sides(tmp_path: Path):
    """An image has two sides."""
    with pytest.raises(ValueError, match=r"image_size .* cannot be '12x12x12'"):
        open_foreign(f"{write(tmp_path / 'a', Timm(), config=TIMM)}?image_size=12x12x12")


@pytest.mark.parametrize(
    ("name", "notes", "act"),
    [("vit_base_patch16_siglip_224", [], tanh_gelu), ("vit_b_clip_quickgelu", [], quick_gelu), ("a_clip", [], F.gelu),
     ("vit_b_clip", ["natively QuickGELU, use quickgelu model variant for original results"], quick_gelu)],
)  # fmt: skip
def test_activation_by_architecture(name, notes, act, tmp_path: Path):
    """SigLIP has the tanh form, CLIP the exact one or its own."""
    clip = "clip" in name
    plain = Timm(norm_pre=clip, act=act, eps=1e-5 if clip else 1e-6)
    config = TIMM | {"architecture": name, "pretrained_cfg": TIMM["pretrained_cfg"] | {"notes": notes}}
    check(plain, write(tmp_path / "a", plain, config=config))


@pytest.mark.parametrize(
    ("make", "config"),
    [
        (HuggingFaceViT, {"model_type": "vit", **SIZES, "id2label": {str(i): f"kind {i}" for i in range(5)}}),
        (HuggingFaceDinov2, {"model_type": "dinov2", **SIZES}),
        (partial(HuggingFaceDinov2, registers=4), {"model_type": "dinov2_with_registers", **SIZES}),
        (partial(HuggingFaceTower, clip=False, act=tanh_gelu), {"model_type": "siglip", "vision_config": SIZES}),
        (partial(HuggingFaceTower, clip=True, act=quick_gelu), {"model_type": "clip", "vision_config": SIZES}),
        (partial(HuggingFaceTower, clip=True, act=F.gelu), {"model_type": "clip", "hidden_act": "gelu", **SIZES}),
    ],
)  # fmt: skip
def test_hugging_face_folders(make, config, tmp_path: Path):
    """Heads, activation and epsilon from config.json or the family's defaults, pixels from the preprocessor."""
    plain = make()
    found = check(plain, write(tmp_path / "a", plain, config=config, preprocessor_config=PIXELS))
    assert found.preprocessing.crop == "resize"
    assert found.classes == (tuple(f"kind {i}" for i in range(5)) if "id2label" in config else None)


def test_heads_of_the_giant():
    """SigLIP 2's giant has 16 heads at a width where DINOv2's has 24."""
    assert from_timm_config(TIMM | {"architecture": "vit_giantopt_patch16_siglip_256", "model_args": {}})["heads"] == 16
    assert "heads" not in from_timm_config(TIMM | {"model_args": {}})


def test_hugging_face_crop(tmp_path: Path):
    """Shorter side to 16, 12 cut out."""
    cropped = PIXELS | {"size": {"shortest_edge": 16}, "crop_size": {"height": 12, "width": 12}}
    plain = HuggingFaceDinov2()
    found = check(
        plain, write(tmp_path / "a", plain, config={"model_type": "dinov2", **SIZES}, preprocessor_config=cropped)
    )
    assert (found.preprocessing.crop, found.preprocessing.central_ratio) == ("central", 16 / 12)


def test_open_clip_folder(tmp_path: Path):
    """open_clip_config.json beside open_clip_model.safetensors."""
    vision = {"image_size": 12, "width": 16, "head_width": 8, "layers": 2}
    config = {
        "model_cfg": {"embed_dim": 6, "quick_gelu": True, "vision_cfg": vision},
        "preprocess_cfg": {"mean": IMAGENET[0], "std": IMAGENET[1]},
    }
    plain = OpenClip(quick_gelu)
    found = check(plain, write(tmp_path / "a", plain, "open_clip_model.safetensors", open_clip_config=config))
    assert (found.preprocessing.crop, found.preprocessing.central_ratio) == ("central", 1.0)
    config["preprocess_cfg"]["resize_mode"] = "squash"  # SigLIP's
    found = check(plain, write(tmp_path / "b", plain, "open_clip_model.safetensors", open_clip_config=config))
    assert found.preprocessing.crop == "resize"


def test_options_in_the_name(tmp_path: Path):
    """What a file does not tell can follow its path, as with data sources; arguments do the same."""
    plain = Timm()
    write(tmp_path, plain, "vit.safetensors")
    mean, std = (",".join(map(str, values)) for values in IMAGENET)
    check(plain, f"{tmp_path}/vit.safetensors?heads=2&mean={mean}&std={std}")  # type: ignore[arg-type]
    check(plain, tmp_path / "vit.safetensors", heads=2, mean=IMAGENET[0], std=IMAGENET[1])


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("vit.safetensors?heads=2", "which mean and std of the pixels"),
        ("vit.safetensors?head=2", "'head=2' in .* is not an option: write KEY=VALUE with mean, std, heads"),
        ("vit.safetensors?heads=two", "the option heads in .* cannot be 'two'"),
        ("vit.pth", "is a pickle, .* safetensors.torch.save_file"),
        ("vit.pth.tar", "is a pickle, .* safetensors.torch.save_file"),
        ("other.safetensors", "there is no file"),
        ("dinov3", "of the kind 'dinov3_vit', which is none of .*upcycle_"),
        ("empty", "has no safetensors file"),
        ("broken", "config.json does not describe a vision transformer"),
        ("pooled", "pools by 'avgmax'"),
    ],
)
def test_mistakes(where: str, words: str, tmp_path: Path):
    """One sentence that says what to do."""
    write(tmp_path, Timm(), "vit.safetensors")
    for name in ("vit.pth", "vit.pth.tar"):
        (tmp_path / name).write_bytes(b"\x80")
    write(tmp_path / "dinov3", Timm(), config={"model_type": "dinov3_vit"})
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text(json.dumps(TIMM))
    write(tmp_path / "broken", Timm(), config={"architecture": "vit", "pretrained_cfg": {"input_size": 3}})
    write(tmp_path / "pooled", Timm(), config=TIMM | {"global_pool": "avgmax"})
    with pytest.raises(ValueError, match=words) as error:
        from_pretrained(f"{tmp_path}/{where}")
    assert "\n" not in str(error.value)


def test_a_new_head(tmp_path: Path):
    """Others' weights are loaded like ours: with another number of classes, in another precision, by the class too."""
    file = write(tmp_path, Timm(), "vit.safetensors") / "vit.safetensors"
    model = VisionTransformer.from_pretrained(file, mean=0.5, std=0.5, heads=2, num_classes=7, dtype=torch.float64)
    assert model(torch.zeros(1, 3, *model.config.image_shape).double()).shape == (1, 7)
    assert from_pretrained(f"{file}?mean=0.5&std=0.5&heads=2", "meta", num_classes=7).head.weight.is_meta


def test_ours_are_not_foreign(tmp_path: Path):
    """A saved model is opened as before, and takes no options of others' weights."""
    found = open_foreign(write(tmp_path / "a", Timm(), config=TIMM))
    assert found is not None
    save_pretrained(found.model, tmp_path / "ours")
    assert open_foreign(tmp_path / "ours") is None
    assert from_pretrained(tmp_path / "ours").config == found.model.config
    with pytest.raises(ValueError, match="heads can be given for files of others' weights only"):
        from_pretrained(tmp_path / "ours", heads=2)


@pytest.mark.timeout(300)
def test_hostile_folders(tmp_path: Path):
    """A tensor in two files, a pipe for weights, and pixels without finite mean and deviation are refused."""
    twice = write(tmp_path / "twice", Timm(), "model-00001-of-00002.safetensors", config=TIMM)
    write(twice, Timm(), "model-00002-of-00002.safetensors")
    pipe = write(tmp_path / "pipe", Timm(), config=TIMM)
    (pipe / "model.safetensors").unlink()
    os.mkfifo(pipe / "model.safetensors")
    endless = TIMM["pretrained_cfg"] | {"std": [0.5, 0.5, float("inf")]}
    write(tmp_path / "pixels", Timm(), config=TIMM | {"pretrained_cfg": endless})
    for name, words in {"twice": "is in two files", "pipe": "not a plain file", "pixels": "finite numbers"}.items():
        with pytest.raises(ValueError, match=words) as error:
            from_pretrained(tmp_path / name)
        assert "\n" not in str(error.value)
