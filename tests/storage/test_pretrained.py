"""Saved models: what goes in comes out bit for bit, and nothing wrong comes out."""

import json
import subprocess
import sys
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from saved_models import NAMES, TINY, refused, tiny

import softmoe
from softmoe.models import MoEConfig, ViTConfig, create_model
from softmoe.moe import SoftConfig, UniformSoftConfig
from softmoe.storage import Preprocessing, open_saved, save_tensors
from softmoe.storage.files import sha256
from softmoe.storage.weights import Spec, plan_shards


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("soft_ti8_4e", {}),
        ("soft_ti8_4e2p", {"positions": "sincos", "image_size": (32, 48)}),
        ("soft_ti8_4e", {"positions": "sincos", "pool": "class", "normalize": False}),
        ("tokens_choice_ti8_4e", {"pool": "attention", "representation_size": 12}),
        ("experts_choice_ti8_4e", {"positions": "none"}),
        ("vit_ti8", {"qk_norm": False}),
    ],
)
def test_round_trip(name, changes, tmp_path):
    """Every kind of model gives the same bits after saving and loading, and config and state are equal."""
    model = tiny(name, **changes)
    softmoe.save_pretrained(model, tmp_path / "m")
    again = softmoe.from_pretrained(tmp_path / "m")
    assert again.config == model.config
    assert not again.training
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[key]), key
    images = torch.randn(3, 3, *model.config.image_shape)
    assert torch.equal(model(images), again(images))
    wider = torch.randn(1, 3, 40, 64)
    assert torch.equal(model(wider), again(wider))


@pytest.mark.parametrize(
    "changes",
    [
        {"dropout": 0, "attention_dropout": 0, "drop_path": 0, "noise_std": 0, "scale_init": 0, "expert_dropout": 0},
        {"blocks": range(1, 2), "image_size": [32, 48], "head_blocks": [0]},
        {"num_classes": np.int64(3), "num_experts": np.int64(2), "blocks": np.array([1]), "dropout": np.float64(0.5)},
    ],
)
def test_other_types_of_the_same_values(changes, tmp_path):
    """Integers for floats, other sequences than tuples and NumPy's numbers are saved as what they stand for."""
    model = tiny("soft_ti8_4e", **changes)
    softmoe.save_pretrained(model, tmp_path / "m")
    again = softmoe.from_pretrained(tmp_path / "m")
    assert again.config == model.config
    assert json.dumps(again.config.to_dict()) == json.dumps(model.config.to_dict())


def test_what_could_not_be_opened_is_not_written(tmp_path):
    """An architecture that reading would refuse is refused when it is saved, and nothing is left of it."""
    model = tiny(scale_init=2e6)
    with pytest.raises(ValueError, match=r"was not written, as it could not be opened again: .*scale_init is at most"):
        softmoe.save_pretrained(model, tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_without_a_head(tmp_path):
    """A model that returns features is saved like any other."""
    model = create_model("vit_ti8", **(TINY | {"num_classes": None})).eval()
    softmoe.save_pretrained(model, tmp_path / "m")
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(model(images), softmoe.from_pretrained(tmp_path / "m")(images))


def test_a_fresh_process_agrees(saved, tmp_path):
    """Another process loads the folder and computes the same bits, without softmoe's random state."""
    images = torch.randn(2, 3, 32, 32)
    save_file({"images": images}, tmp_path / "in.safetensors")
    code = (
        "import softmoe, torch; from safetensors.torch import load_file, save_file; torch.set_num_threads(1);"
        f"y = softmoe.from_pretrained({str(saved)!r})(load_file({str(tmp_path / 'in.safetensors')!r})['images']);"
        f"save_file({{'y': y.detach()}}, {str(tmp_path / 'out.safetensors')!r})"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
    with torch.no_grad():
        expected = softmoe.from_pretrained(saved)(images)
    assert torch.equal(load_file(tmp_path / "out.safetensors")["y"], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_types_are_kept(dtype, tmp_path):
    """Weights come back in the type they were saved in, with the computed tables, or in the type asked for."""
    model = tiny(positions="sincos").to(dtype)
    softmoe.save_pretrained(model, tmp_path / "m")
    again = softmoe.from_pretrained(tmp_path / "m")
    tensors = [*again.parameters(), *again.buffers()]
    assert {tensor.dtype for tensor in tensors} == {dtype}
    assert torch.equal(again.positions.table, model.positions.table)
    converted = softmoe.from_pretrained(tmp_path / "m", dtype=torch.float32)
    assert {tensor.dtype for tensor in [*converted.parameters(), *converted.buffers()]} == {torch.float32}


def test_mixed_types(tmp_path):
    """Tensors of different types in one file keep theirs."""
    model = tiny().to(torch.bfloat16)
    model.head.float()
    softmoe.save_pretrained(model, tmp_path / "m")
    again = softmoe.from_pretrained(tmp_path / "m")
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[key]), key
        assert tensor.dtype == again.state_dict()[key].dtype


def test_the_file_is_plain_safetensors(saved):
    """The library's own reader finds the same tensors."""
    model = softmoe.from_pretrained(saved)
    theirs = load_file(saved / "model.safetensors")
    assert theirs.keys() == model.state_dict().keys()
    for key, tensor in theirs.items():
        assert torch.equal(tensor, model.state_dict()[key])


def test_weights_are_mapped_and_private(saved):
    """Loaded weights can be trained: writing to them does not reach the file."""
    before = (saved / "model.safetensors").read_bytes()
    model = softmoe.from_pretrained(saved)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    model(torch.randn(1, 3, 32, 32)).sum().backward()
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert (saved / "model.safetensors").read_bytes() == before


def test_onto_meta(saved):
    """The meta device gets shapes and types and reads no weights."""
    model = softmoe.from_pretrained(saved, "meta")
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert model(torch.empty(2, 3, 32, 32, device="meta")).shape == (2, 5)


def test_unknown_device(saved):
    """A device that is not there is named."""
    refused(saved, "the device 'tpu9' cannot be used here", device="tpu9")


def test_shards(sharded):
    """Above the limit there are shards of at most that size and an index in the usual form."""
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in sharded.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert sorted(set(index["weight_map"].values())) == files
    merged = {}
    for file in files:
        part = load_file(sharded / file)
        assert len(part) == 1 or sum(t.nbytes for t in part.values()) <= 40_000
        assert all(index["weight_map"][name] == file for name in part)
        merged |= part
    model = softmoe.from_pretrained(sharded)
    assert merged.keys() == model.state_dict().keys()
    assert all(torch.equal(merged[name], tensor) for name, tensor in model.state_dict().items())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in merged.values())


def test_plan_of_shards():
    """Names stay in order; one that is too large has a shard to itself; a limit below one byte is refused."""
    specs = {name: Spec(torch.float32, (count,)) for name, count in {"a": 2, "b": 2, "c": 9, "d": 1}.items()}
    assert plan_shards(specs, 16) == [["a", "b"], ["c"], ["d"]]
    assert plan_shards(specs, 10**9) == [["a", "b", "c", "d"]]
    with pytest.raises(ValueError, match="at least 1"):
        plan_shards(specs, 0)


def test_tensors_one_by_one(tmp_path):
    """`save_tensors` asks for every tensor once and writes what `save_pretrained` does."""
    model = tiny()
    state, asked = model.state_dict(), []
    specs = {name: Spec.of(tensor) for name, tensor in state.items()}
    save_tensors(model.config, specs, lambda name: asked.append(name) or state[name], tmp_path / "a")
    softmoe.save_pretrained(model, tmp_path / "b")
    assert sorted(asked) == sorted(state)
    assert sha256(tmp_path / "a" / "model.safetensors") == sha256(tmp_path / "b" / "model.safetensors")


def test_what_is_noted(saved):
    """Classes, preprocessing and provenance are read back; the version and the date are added."""
    found = open_saved(saved)
    assert found.classes == NAMES
    assert found.preprocessing == Preprocessing((32, 32))
    assert found.provenance["run"] == "r"
    assert found.provenance["softmoe"] == softmoe.__version__
    assert found.provenance["date"].endswith("+00:00")


def test_fingerprint(saved, tmp_path):
    """Follows the weights and not the place."""
    softmoe.save_pretrained(softmoe.from_pretrained(saved), tmp_path / "copy")
    other = tiny()
    with torch.no_grad():
        other.head.bias[0] += 1e-3
    softmoe.save_pretrained(other, tmp_path / "other")
    assert open_saved(saved).fingerprint == open_saved(tmp_path / "copy").fingerprint
    assert open_saved(saved).fingerprint != open_saved(tmp_path / "other").fingerprint


@dataclass(frozen=True)
class LaterSoft(SoftConfig):
    new: int = 1


@dataclass(frozen=True)
class LaterMoE(MoEConfig):
    new: int = 1


@dataclass(frozen=True)
class LaterViT(ViTConfig):
    new: int = 1


def test_fingerprint_in_later_versions(saved):
    """Settings that a later version adds change no fingerprint while they are at their defaults; others count."""
    now = open_saved(saved)
    moe = now.config.moe
    router, layer = vars(moe.router), vars(moe)

    def later(new: int = 1, **changes) -> str:
        grown = LaterMoE(**(layer | {"router": LaterSoft(**router, new=new)}))
        return replace(now, config=LaterViT(**(vars(now.config) | {"moe": grown} | changes))).fingerprint

    assert later() == now.fingerprint
    assert len({later(), later(new=2), later(heads=1), later(activation="gelu"), later(moe=None)}) == 5
    dispatched = replace(moe, router=UniformSoftConfig(**router))
    assert replace(now, config=replace(now.config, moe=dispatched)).fingerprint != now.fingerprint


def test_preprocessing_of_a_transform():
    """The random crops of training become their counterparts in evaluation."""

    @dataclass
    class Settings:
        crop: str
        image_size: int = 64
        central_ratio: float = 1.25
        antialias: bool = False

    assert Preprocessing.of(Settings("inception")) == Preprocessing((64, 64), "central", 1.25, False)
    assert Preprocessing.of(Settings("pad_crop")).crop == "resize"
    assert Preprocessing.of(Settings("resize")).crop == "resize"


def test_card(saved):
    """The card states the facts: size, experts, classes, origin, checksum."""
    card = (saved / "README.md").read_text()
    facts = open_saved(saved)
    count = sum(p.numel() for p in softmoe.from_pretrained(saved).parameters())
    for fact in (f"{count:,}", "4 (soft, 1 slot each) in blocks 1", "cat, dog", "| step | 7 |", "5 classes"):
        assert fact in card
    assert facts.files["model.safetensors"].sha256 in card


def test_compiled_and_wrapped_models_are_unwrapped(tmp_path):
    """What torch.compile or data parallelism puts around a model is not saved."""

    class Wrapper(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    model = tiny()
    softmoe.save_pretrained(Wrapper(model), tmp_path / "m")
    assert torch.equal(softmoe.from_pretrained(tmp_path / "m").head.weight, model.head.weight)


def test_replaces_a_saved_model(saved):
    """Saving again in the same place gives the new model; a model still mapped from the old file is not disturbed."""
    old = softmoe.from_pretrained(saved)
    before = old.head.weight.clone()
    new = tiny()
    softmoe.save_pretrained(new, saved, max_shard_bytes=40_000)
    assert torch.equal(old.head.weight, before)
    assert torch.equal(softmoe.from_pretrained(saved).head.weight, new.head.weight)
    assert not (saved / "model.safetensors").exists()
    assert [p.name for p in saved.parent.iterdir()] == ["m"]


def test_refuses_to_overwrite(saved, tmp_path):
    """Neither a folder of other things, nor a file, nor a saved model with a stranger in it is replaced."""
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_text("x")
    (tmp_path / "file").write_text("x")
    (saved / "notes.txt").write_text("x")
    for name, word in {"photos": "is not a saved model", "file": "is a file", "m": "notes.txt"}.items():
        with pytest.raises(ValueError, match=word):
            softmoe.save_pretrained(tiny(), tmp_path / name)
    assert (tmp_path / "photos" / "a.jpg").exists()
    assert (saved / "notes.txt").exists()


@pytest.mark.parametrize("existing", [False, True])
def test_a_failed_save_leaves_what_was_there(existing, tmp_path):
    """If writing stops in the middle, the old model is whole, or there is none, and no rest lies about."""
    model, target = tiny(), tmp_path / "m"
    if existing:
        softmoe.save_pretrained(model, target)
    state = model.state_dict()

    def fails_late(name):
        if name == "head.weight":
            raise OSError("disk full")
        return state[name]

    with pytest.raises(OSError, match="disk full"):
        save_tensors(model.config, {n: Spec.of(t) for n, t in state.items()}, fails_late, target)
    assert [p.name for p in tmp_path.iterdir()] == (["m"] if existing else [])
    if existing:
        softmoe.from_pretrained(target)


def test_what_cannot_be_saved(tmp_path):
    """Foreign modules, models without weights, wrong class names and incomplete tensors are refused at once."""
    with pytest.raises(ValueError, match="not a Linear"):
        softmoe.save_pretrained(torch.nn.Linear(2, 2), tmp_path / "m")
    with torch.device("meta"):
        empty = create_model("soft_ti8_4e", **TINY)
    with pytest.raises(ValueError, match="no weights to save"):
        softmoe.save_pretrained(empty, tmp_path / "m")
    with pytest.raises(ValueError, match="2 class names were given, but the model has 5 outputs"):
        softmoe.save_pretrained(tiny(), tmp_path / "m", classes=["a", "b"])
    model = tiny()
    with pytest.raises(ValueError, match=r"m was not written: .* \(\d+ such\)"):
        save_tensors(model.config, {}, model.state_dict().__getitem__, tmp_path / "m")
    wider = replace(model.config, mlp_dim=64)
    specs = {name: Spec.of(tensor) for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match="but the model needs"):
        save_tensors(wider, specs, model.state_dict().__getitem__, tmp_path / "m")
    with pytest.raises(ValueError, match=r"unknown key .preprocessing\.size."):
        softmoe.save_pretrained(model, tmp_path / "m", preprocessing={"size": 3})
    assert not (tmp_path / "m").exists()
