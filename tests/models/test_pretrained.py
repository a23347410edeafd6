"""Saved models: what goes in comes out bit for bit, and nothing wrong comes out."""

import json
import pickle
import subprocess
import sys
import types
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import softmoe
from softmoe.models import VisionTransformer, create_model
from softmoe.models.pretrained import Preprocessing, load_saved, open_saved, save_tensors
from softmoe.models.weights import Spec, plan_shards, sha256

TINY = {"image_size": 32, "num_classes": 5, "width": 32, "heads": 2, "mlp_dim": 48, "depth": 2}
NAMES = ("cat", "dog", "eel", "fox", "gnu")


def tiny(name: str = "soft_ti8_4e", **changes) -> VisionTransformer:
    model = create_model(name, **(TINY | changes))
    torch.nn.init.normal_(model.head.weight)
    return model.eval()


@pytest.fixture
def saved(tmp_path) -> Path:
    softmoe.save_pretrained(tiny(), tmp_path / "m", classes=NAMES, provenance={"run": "r", "step": 7})
    return tmp_path / "m"


@pytest.fixture
def sharded(tmp_path) -> Path:
    softmoe.save_pretrained(tiny(), tmp_path / "s", max_shard_bytes=40_000)
    return tmp_path / "s"


def edit(folder: Path, change) -> None:
    values = json.loads((folder / "config.json").read_text())
    change(values)
    (folder / "config.json").write_text(json.dumps(values))


def restate(folder: Path) -> None:
    """Make config.json state the hashes of the files as they are: what a careful forger would do."""

    def change(values):
        for name, facts in values["weights"]["files"].items():
            facts |= {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)}

    edit(folder, change)


def refused(folder: Path | str, *words: str, **options) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        softmoe.from_pretrained(folder, **options)
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text


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
    for fact in (f"{count:,}", "4 (soft, 1 slots each) in blocks 1", "cat, dog", "| step | 7 |", "5 classes"):
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


# --- where a model may be


def test_a_run_folder(saved, tmp_path):
    """A run's exported model is found in its model/."""
    run = tmp_path / "runs" / "x"
    run.mkdir(parents=True)
    saved.rename(run / "model")
    (run / "config.json").write_text("{}")
    assert open_saved(run).folder == run / "model"


def checkpoint(folder: Path, model: VisionTransformer, **extra) -> None:
    folder.mkdir(parents=True)
    save_file(model.state_dict(), folder / "model.safetensors")
    for name, other in extra.items():
        save_file(other.state_dict(), folder / f"{name}.safetensors")
    transform = {"image_size": 32, "crop": "inception", "central_ratio": 1.2, "antialias": True, "flip": True}
    state = {"config": {"run_name": "x", "data": {"train": "shapes", "transform": transform}}}
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))
    (folder / "state.json").write_text(json.dumps(state))
    files = {p.name: {"bytes": p.stat().st_size, "sha256": sha256(p)} for p in folder.iterdir()}
    (folder / "manifest.json").write_text(json.dumps({"step": 3, "files": files}))


def test_a_run_without_an_export(tmp_path):
    """The best checkpoint is used, else the last; of one with averaged weights, those."""
    last, best, average = tiny(), tiny(), tiny()
    checkpoint(tmp_path / "x" / "checkpoints" / "last", last)
    assert torch.equal(softmoe.from_pretrained(tmp_path / "x").head.weight, last.head.weight)
    checkpoint(tmp_path / "x" / "checkpoints" / "best", best, ema=average)
    found = open_saved(tmp_path / "x")
    assert torch.equal(load_saved(found).head.weight, average.head.weight)
    assert found.provenance["step"] == 3
    assert found.preprocessing == Preprocessing((32, 32), "central", 1.2)


def test_a_broken_checkpoint(tmp_path):
    """A checkpoint that lacks its state is refused."""
    checkpoint(tmp_path / "c", tiny())
    (tmp_path / "c" / "state.json").unlink()
    refused(tmp_path / "c", "is not a readable checkpoint", "state.json")


def test_missing_folder(tmp_path):
    """A folder that is not there, a file, and a folder of something else are named."""
    refused(tmp_path / "none", "there is no folder", "none")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "is a file")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "is not a saved model")
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "vit"}')
    refused(tmp_path / "empty", "is not a saved model")


def test_hub_package_is_absent(monkeypatch):
    """Without huggingface_hub a Hub id says what to install."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refused("user/name", "no folder user/name", "pip install 'softmoe[hub]'")


def test_hub_is_offline(monkeypatch):
    """A failed download is one sentence."""

    def fails(*arguments, **options):
        raise ConnectionError("Cannot reach huggingface.co: offline mode is enabled.\nMore lines")

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=fails))
    refused("user/name", "could not be fetched from the Hub: Cannot reach")


def test_hub_download(monkeypatch, saved):
    """What the Hub's library downloads is read like any folder; pickles are never asked for."""
    asked = {}

    def gives(name, revision, allow_patterns):
        asked.update(name=name, revision=revision, patterns=allow_patterns)
        return str(saved)

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=gives))
    assert softmoe.from_pretrained("user/name", revision="v1").config.num_classes == 5
    assert asked["name"] == "user/name"
    assert asked["revision"] == "v1"
    assert not any("bin" in pattern or "pt" in pattern.split(".") for pattern in asked["patterns"])


def test_hub_upload(monkeypatch, saved, tmp_path):
    """Only a saved model goes up, and only its own files."""
    calls = []
    api = types.SimpleNamespace(
        create_repo=lambda name, **options: calls.append(("create", name)),
        upload_folder=lambda **options: calls.append(("upload", options["folder_path"])) or "https://there",
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", api)
    assert softmoe.hub.upload(saved, "user/name") == "https://there"
    assert calls == [("create", "user/name"), ("upload", str(saved))]
    with pytest.raises(ValueError, match="is not a saved model"):
        softmoe.hub.upload(tmp_path, "user/name")
    with pytest.raises(ValueError, match="looks like user/name"):
        softmoe.hub.upload(saved, "name")


# --- what is refused


def test_truncated(saved):
    """A file that was cut is named with both sizes."""
    path = saved / "model.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-100])
    refused(saved, f"{size - 100} bytes instead of {size}")


def test_truncated_and_restated(saved):
    """Even if the sizes are made to agree, the header tells that bytes are missing."""
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    restate(saved)
    refused(saved, "is not a readable safetensors file")


@pytest.mark.parametrize("place", [20, 5000, -1])
def test_flipped_byte(saved, place):
    """One changed bit anywhere is found."""
    path = saved / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    refused(saved, "SHA-256")


def test_verify_can_be_skipped(saved):
    """Without checksums a flipped weight is not seen: that is what was asked for."""
    path = saved / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    softmoe.from_pretrained(saved, verify=False)


def test_swapped_config(saved, tmp_path):
    """The config.json of another model of the same shapes is refused, with and without checksums."""
    other = tiny(heads=4, qk_norm=False)
    softmoe.save_pretrained(other, tmp_path / "other")
    (saved / "config.json").write_text((tmp_path / "other" / "config.json").read_text())
    refused(saved, "bytes instead of")
    restate(saved)
    refused(saved, "is not the one these weights were saved with")
    refused(saved, "is not the one these weights were saved with", verify=False)


def test_edited_heads(saved):
    """A change that fits every shape is found, because the weights remember what they were saved with."""
    softmoe.save_pretrained(tiny("vit_ti8", qk_norm=False), saved)
    edit(saved, lambda values: values["architecture"].update(heads=4))
    refused(saved, "heads = 4, the weights say 2")


def test_wrong_number_of_experts(saved):
    """The number in config.json and the number in the file are both named."""
    edit(saved, lambda values: values["architecture"]["moe"].update(num_experts=8))
    refused(saved, "moe.num_experts = 8, the weights say 4")


def test_wrong_number_of_experts_in_foreign_files(saved):
    """Files without our note are judged by the shapes."""
    save_file(load_file(saved / "model.safetensors"), saved / "model.safetensors")
    edit(saved, lambda values: values["architecture"]["moe"].update(num_experts=8))
    restate(saved)
    refused(saved, "do not fit its config.json", "(32, 4, 1)", "(32, 8, 1)")


def test_missing_and_extra_tensors(saved):
    """Names must be exactly the model's."""
    tensors = load_file(saved / "model.safetensors")
    bias = tensors.pop("head.bias")
    save_file(tensors, saved / "model.safetensors")
    restate(saved)
    refused(saved, "head.bias is missing")
    save_file(tensors | {"head.bias": bias, "stranger": bias.clone()}, saved / "model.safetensors")
    restate(saved)
    refused(saved, "stranger is not part of the model")


def test_wrong_type(saved):
    """Integers are not weights, and other types than stated are refused."""
    tensors = load_file(saved / "model.safetensors")
    save_file(tensors | {"head.bias": torch.zeros(5, dtype=torch.int32)}, saved / "model.safetensors")
    restate(saved)
    refused(saved, "head.bias", "floating-point")
    save_file({name: tensor.half() for name, tensor in tensors.items()}, saved / "model.safetensors")
    restate(saved)
    refused(saved, "float16", "config.json says", "float32")


def test_missing_shard(sharded):
    """The shard is named."""
    (sharded / sorted(p.name for p in sharded.glob("model-00002*"))[0]).unlink()
    refused(sharded, "model-00002-of-", "is missing")


def test_exchanged_shards(sharded):
    """Two shards under each other's names are found."""
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    first.rename(sharded / "aside")
    second.rename(first)
    (sharded / "aside").rename(second)
    refused(sharded, "bytes instead of")
    restate(sharded)
    refused(sharded, "index.json does not match")


def test_missing_index(sharded):
    """Shards without their index are refused."""
    (sharded / "model.safetensors.index.json").unlink()
    refused(sharded, "index.json cannot be read")


def test_the_same_tensor_twice(sharded):
    """A tensor in two shards is ambiguous."""
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    save_file(load_file(first) | load_file(second), second)
    restate(sharded)
    refused(sharded, "is in two files")


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("how", ["torch", "pickle", "old torch"])
@pytest.mark.parametrize("verify", [True, False])
def test_a_pickle_is_not_opened(saved, tmp_path, how, verify):
    """A pickle under the name of a weight file is refused by its first bytes and nothing in it runs."""
    path = saved / "model.safetensors"
    if how == "pickle":
        path.write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    else:
        torch.save(Bomb(tmp_path / "exploded"), path, _use_new_zipfile_serialization=how == "torch")
    restate(saved)
    refused(saved, "is a pickle", "not opened", verify=verify)
    assert not (tmp_path / "exploded").exists()


def test_a_random_file(saved):
    """Bytes that are nothing at all are refused too."""
    (saved / "model.safetensors").write_bytes(b"no weights here, only words" * 9)
    restate(saved)
    refused(saved, "is not a readable safetensors file")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: v.update(colour=1), ("unknown key 'colour'",)),
        (lambda v: v["architecture"].update(widht=3), ("unknown key 'architecture.widht'", "'architecture.width'")),
        (lambda v: v["architecture"]["moe"].update(slots=3), ("architecture.moe.slots",)),
        (lambda v: v["preprocessing"].update(mean=0), ("preprocessing.mean",)),
        (lambda v: v["preprocessing"].update(crop="five"), ("central or resize",)),
        (lambda v: v["preprocessing"].update(value_range=[0, 1]), ("value_range",)),
        (lambda v: v["preprocessing"].update(image_size=[3]), ("image_size",)),
        (lambda v: v["architecture"].update(width="wide"), ("does not describe a model",)),
        (lambda v: v["architecture"].update(pool="max"), ("pool must be one of",)),
        (lambda v: v["architecture"].update(moe="many"), ("architecture.moe must be an object",)),
        (lambda v: v.pop("classes"), ("'classes' is missing",)),
        (lambda v: v.update(classes=["a"]), ("names 1 classes", "5 outputs")),
        (lambda v: v.update(classes=[1, 2, 3, 4, 5]), ("list of names",)),
        (lambda v: v.update(kind="text"), ("'text'",)),
        (lambda v: v.update(format_version=2), ("format version 2", "reads version 1")),
        (lambda v: v["weights"].update(files={}), ("no weight file",)),
        (lambda v: v["weights"].update(files={"../x.safetensors": {}}), ("is not the name of a weight file",)),
        (lambda v: v["weights"].update(files={"model.safetensors": {}}), ("does not describe a model",)),
    ],
)
def test_bad_config(saved, change, words):
    """Unknown keys, wrong values and missing parts of config.json are errors that name the key."""
    edit(saved, change)
    refused(saved, "config.json", *words)


def test_config_is_not_json(saved):
    """A config.json that is no JSON at all makes the folder no saved model."""
    (saved / "config.json").write_text('{"format": "softmoe"')
    refused(saved, "is not a saved model")


# --- writing


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
