"""Checkpoints and saved models that a stranger made, with hashes that agree: refused in one sentence, before use."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from saved_models import edit, refused, restate, tiny
from torch import nn

import softmoe
from softmoe.storage.checkpoint import (
    BrokenCheckpoint,
    Snapshot,
    copy_tensors,
    optimizer_targets,
    optimizer_tensors,
    read_checkpoint,
    restore,
    write_checkpoint,
)
from softmoe.storage.files import FileFacts
from softmoe.storage.shards import check_cover
from softmoe.storage.weights import Spec
from softmoe.train.config import OptimSection
from softmoe.train.optim import make_optimizer, set_learning_rate


def make(**settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = make_optimizer(model, OptimSection(**settings))
    set_learning_rate(optimizer, 0.1)
    return model, optimizer


def trained(folder: Path, **settings: Any) -> Path:
    model, optimizer = make(**settings)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    tensors = {"model": copy_tensors(model.state_dict()), "optimizer": copy_tensors(optimizer_tensors(optimizer))}
    return write_checkpoint(folder, Snapshot(2, tensors, {"state": {"step": 2, "progress": {"step": 2}}}))


def forge(folder: Path, name: str, change: Callable[[dict], Any]) -> None:
    """Change a file of tensors and make the manifest agree with it."""
    tensors = load_file(folder / f"{name}.safetensors")
    tensors = {key: value.clone() for key, value in tensors.items()}
    change(tensors)
    save_file(tensors, folder / f"{name}.safetensors")
    repair(folder)


def repair(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = {n: vars(FileFacts.of(folder / n)) for n in manifest["files"]}
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("settings", [{}, {"states": "bfloat16"}, {"name": "sgd"}])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda t, k: t.update({k: t[k][:1].clone()}),
            r"is \[1, 3\] in the checkpoint and \[4, 3\] in this run",
        ),
        (lambda t, k: t.update({k: torch.zeros(40, 3)}), r"is \[40, 3\] in the checkpoint and \[4, 3\]"),
        (lambda t, k: t.update({k: t[k].double()}), r"is torch.float64 in the checkpoint and torch\.\w+ in"),
        (lambda t, k: t.update({k: t[k].to(torch.int8)}), r"is torch.int8 in the checkpoint"),
        (lambda t, k: t.update({k: t[k] * float("nan")}), "not finite"),
        (lambda t, k: t.update({"weight/max_exp": t[k].clone()}), "weight/max_exp, which .* does not know"),
        (lambda t, k: t.update({"other/exp_avg": t[k].clone()}), "'other', which this run does not train"),
    ],
)
def test_moments_that_do_not_fit(tmp_path: Path, settings: dict, change: Callable, words: str):
    """Moments of another shape or type would be written beyond by compiled code: they never reach the optimizer."""
    folder = trained(tmp_path, **settings)
    key = "weight/momentum_buffer" if settings.get("name") == "sgd" else "weight/exp_avg"
    forge(folder, "optimizer", lambda tensors: change(tensors, key))
    model, optimizer = make(**settings)
    with pytest.raises(ValueError, match=words):
        restore(read_checkpoint(folder), model, optimizer)
    assert not optimizer.state


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("weight/exp_avg_sq"), "no weight/exp_avg_sq, which AdamW needs"),
        (lambda t: t.clear(), "no optimizer state, which AdamW needs"),
        (lambda t: t["weight/exp_avg_sq"].sub_(9), "mean of squares below zero in weight/exp_avg_sq"),
        (lambda t: t.update({"bias/step": torch.tensor(7.0)}), "of step 2, but bias/step says 7 updates"),
        (lambda t: t.update({"bias/step": torch.tensor(-1.0)}), "says -1 updates"),
        (lambda t: t.update({"bias/step": torch.ones(2)}), r"bias/step is \[2\] in the checkpoint and \[\]"),
        (lambda t: t.update({"bias/step": torch.tensor(2)}), "bias/step is torch.int64"),
    ],
)
def test_optimizer_state_that_cannot_be(tmp_path: Path, change: Callable, words: str):
    """Missing moments and impossible numbers of updates are refused."""
    folder = trained(tmp_path)
    forge(folder, "optimizer", change)
    with pytest.raises(ValueError, match=words):
        restore(read_checkpoint(folder), *make())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.update(weight=t["weight"][:2].clone()), r"weight is \[2, 3\] torch.float32 there and \[4, 3\]"),
        (lambda t: t.update(weight=t["weight"].double()), r"float64 there and \[4, 3\] torch.float32 here"),
        (lambda t: t.pop("bias"), "it has no bias"),
        (lambda t: t.update(more=t["bias"].clone()), "it has more, which this one does not know"),
        (lambda t: t["bias"].fill_(float("inf")), "bias holds numbers that are not finite"),
    ],
)
def test_weights_that_do_not_fit(tmp_path: Path, change: Callable, words: str):
    """Names, shapes, types and values of the weights are checked before the model is changed."""
    folder = trained(tmp_path)
    forge(folder, "model", change)
    with pytest.raises(ValueError, match=words):
        restore(read_checkpoint(folder), *make())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.clear(), "the two keys 'step' and 'files'"),
        (lambda m: m.update(files={}), "names no weights"),
        (lambda m: m.update(step=3), "says step 3, but its folder is of step 2"),
        (lambda m: m.update(step="2"), "no number of steps"),
        (lambda m: m.update(step=True), "no number of steps"),
        (lambda m: m["files"].update({"../x.json": {}}), "no file of a checkpoint"),
        (lambda m: m["files"].update({"x.json": {}}), "does not state size and SHA-256"),
        (lambda m: m["files"].update({"x.json": {"bytes": 0, "sha256": "0" * 64}}), "missing or no plain file"),
    ],
)
def test_manifests_that_lie(tmp_path: Path, change: Callable, words: str):
    """A manifest with another step, without files or with names outside of the folder makes a broken checkpoint."""
    folder = trained(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BrokenCheckpoint, match=words):
        read_checkpoint(folder)


def test_a_renamed_checkpoint(tmp_path: Path):
    """The folder, the manifest and state.json must agree on the step."""
    folder = trained(tmp_path)
    shutil.copytree(folder, tmp_path / "step_00000009")
    with pytest.raises(BrokenCheckpoint, match="its folder is of step 9"):
        read_checkpoint(tmp_path / "step_00000009")
    (folder / "state.json").write_text('{"step": 2, "progress": {"step": 5}}')
    repair(folder)
    with pytest.raises(BrokenCheckpoint, match=r"manifest\.json says step 2, but state\.json says 5"):
        read_checkpoint(folder)


def test_steps_go_to_the_parameters_device():
    """The counter of updates lies beside its parameter, as torch's own loading puts it there."""
    parameter = nn.Parameter(torch.zeros(3, device="meta"))
    optimizer = torch.optim.AdamW([{"params": [parameter], "names": ["w"]}])
    specs = {
        f"w/{part}": Spec(torch.float32, shape)
        for part, shape in (("step", ()), ("exp_avg", (3,)), ("exp_avg_sq", (3,)))
    }
    assert {tensor.device.type for tensor in optimizer_targets(specs, optimizer).values()} == {"meta"}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([((0, 0), (2, 3))], "do not make up its shape"),
        ([((0, 0), (4, 3)), ((2, 0), (2, 3))], "overlap"),
        ([((0, 0), (5, 3))], "outside"),
        ([((-1, 0), (4, 3))], "outside"),
    ],
)
def test_parts_must_make_up_the_whole(parts: list, words: str):
    """What no part of a sharded tensor has would stay zero in silence."""
    check_cover("w", [((0, 0), (2, 3)), ((2, 0), (2, 3))], (4, 3), Path("x"))
    with pytest.raises(ValueError, match=words):
        check_cover("w", parts, (4, 3), Path("x"))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    softmoe.save_pretrained(tiny(), tmp_path / "m")
    return tmp_path / "m"


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("depth", 10_000, ("depth", "10000")),
        ("depth", 900, ("needs 900 blocks, but there are 2",)),
        ("depth", -1, ("depth",)),
        ("depth", 10**300, ("depth",)),
        ("width", 10**9, ("config.json",)),
        ("mlp_dim", 10**9, ()),
        ("num_classes", 10**9, ()),
        ("width", 32.0, ("width must be int",)),
        ("width", True, ("width must be int",)),
        ("width", 10**12, ("width",)),
        ("heads", 0, ("heads is from 1",)),
        ("dropout", float("nan"), ("dropout must be float",)),
        ("dropout", float("inf"), ("dropout must be float",)),
        ("moe", 0, ("moe",)),
        ("image_size", [10**6, 10**6], ("image_size",)),
    ],
)
def test_absurd_numbers(saved: Path, key: str, value: Any, words: tuple[str, ...]):
    """Whatever number config.json holds, also where the weights do not remember theirs: a sentence, no allocation."""
    save_file(load_file(saved / "model.safetensors"), saved / "model.safetensors")
    restate(saved)
    edit(saved, lambda values: values["architecture"].update({key: value}))
    refused(saved, *words)


def test_a_huge_table_of_positions(saved: Path):
    """Positions that are computed and not read are bounded too."""
    softmoe.save_pretrained(tiny(positions="sincos", patch_size=1, image_size=4), saved)
    edit(saved, lambda values: values["architecture"].update(image_size=16_000))
    refused(saved, "the table of positions would have 256000000 rows")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: v["preprocessing"].pop("image_size"), "preprocessing.image_size is missing"),
        (lambda v: v["preprocessing"].pop("crop"), "preprocessing.crop is missing"),
        (lambda v: v["preprocessing"].update(central_ratio=float("nan")), "central_ratio is from 1 to 100"),
        (lambda v: v["preprocessing"].update(central_ratio="1"), "wrong type"),
        (lambda v: v["preprocessing"].update(antialias=1), "antialias is true or false"),
        (lambda v: v["preprocessing"].update(image_size=[10**9, 8]), "more than can be worked on"),
        (lambda v: v["preprocessing"].update(crop=["central"]), "crop is central or resize"),
        (lambda v: v.update(classes="abcde"), "classes must be a list of names"),
        (lambda v: v.update(classes=5), "classes must be a list of names"),
        (lambda v: v.update(provenance=[["a", 1]]), "provenance must be an object"),
        (lambda v: v["weights"].update(dtypes={"float32": "many"}), "number of tensors"),
        (lambda v: v["weights"]["files"]["model.safetensors"].update(bytes="5"), "are not stated"),
    ],
)
def test_config_values_of_the_wrong_kind(saved: Path, change: Callable, words: str):
    """Missing, unknown and impossible values are named."""
    edit(saved, change)
    refused(saved, "config.json", words)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.full((5,), float("nan")), "head.bias holds numbers that are not finite"),
        (torch.full((5,), float("-inf")), "head.bias holds numbers that are not finite"),
        (torch.zeros(5, dtype=torch.bool), "floating-point"),
        (torch.zeros(5, dtype=torch.complex64), "head.bias has the type"),
    ],
)
def test_weights_that_are_no_numbers(saved: Path, value: torch.Tensor, words: str):
    """NaN, infinity, bools and complex numbers are no weights."""
    save_file(load_file(saved / "model.safetensors") | {"head.bias": value}, saved / "model.safetensors")
    restate(saved)
    refused(saved, words)


def test_large_weights_are_fine(saved: Path):
    """A sum that overflows is no infinity in the weights."""
    model = tiny()
    nn.init.constant_(model.head.weight, 3e38)
    softmoe.save_pretrained(model, saved)
    assert softmoe.from_pretrained(saved).head.weight.max() == torch.tensor(3e38)


def test_a_model_that_is_not_finite_is_not_written(tmp_path: Path):
    """What could not be read again is not saved; what was there before stays."""
    softmoe.save_pretrained(tiny(), tmp_path / "m")
    model = tiny()
    nn.init.constant_(model.head.bias, float("nan"))
    with pytest.raises(ValueError, match=r"m was not written: head\.bias holds numbers that are not finite"):
        softmoe.save_pretrained(model, tmp_path / "m")
    softmoe.from_pretrained(tmp_path / "m")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
