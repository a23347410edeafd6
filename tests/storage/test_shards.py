"""Checkpoints: saved on any mesh, resumed on any other; refused where they do not fit; whole or not there."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from parallel import checks
from parallel.ranks import run_ranks
from safetensors.torch import save_file

from softmoe.convert import from_pretrained
from softmoe.storage.checkpoint import Checkpoint, fill, optimizer_targets, tensor_specs
from softmoe.storage.shards import part_specs, save_parts

pytestmark = pytest.mark.slow


def assert_close(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-10, atol=1e-10)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, dict]:
    """The folders `four` (experts on 2 ranks, cut in 2), `two` and `one` (single files), and all resumed weights."""
    folder = tmp_path_factory.mktemp("checkpoints")
    uninterrupted = checks.Training().steps(0, 1)
    (folder / "one").mkdir()
    for name, tensors in uninterrupted.tensors().items():
        save_file({key: value.clone() for key, value in tensors.items()}, folder / "one" / f"{name}.safetensors")
    results = {"one": uninterrupted.steps(2).weights()}
    two = run_ranks(2, checks.save_and_resume, folder, {"two": (2, 1)}, [("two", (2, 1)), ("one", (1, 2))])
    four = run_ranks(
        4,
        checks.save_and_resume,
        folder,
        {"four": (2, 4)},
        [("four", (2, 4)), ("four", (4, 1)), ("two", (2, 2)), ("one", (4, 4))],
    )
    back = run_ranks(2, checks.save_and_resume, folder, {}, [("four", (1, 2)), ("four", (2, 2))])
    for result in (two, four, back):
        results |= {("ranks", len(result), key): value for key, value in result[0].items()}
    return folder, results


def test_resumed_on_another_mesh(saved):
    """4 ranks to 2 to 1 and back, and from a single file to many ranks: the next step is that of one process."""
    _, results = saved
    assert len(results) == 11
    for weights in results.values():
        assert_close(weights, results["one"])


def test_resumed_on_the_same_mesh_bit_for_bit(saved):
    """What was saved in the background, while training went on, continues with the same bits."""
    _, results = saved
    for world, name, mesh in ((4, "four", (2, 4)), (2, "two", (2, 1))):
        ours, theirs = results["ranks", world, (name, mesh)], results["ranks", world, name]
        assert all(torch.equal(ours[key], value) for key, value in theirs.items())


@pytest.mark.parametrize("name", ["four", "two"])
def test_resumed_in_one_process(saved, name):
    """No process group is needed to read what many ranks wrote."""
    folder, results = saved
    assert_close(checks.Training(seed=9).load(folder / name).steps(2).weights(), results["one"])


def test_export(saved, tmp_path):
    """A sharded checkpoint becomes the usual folder, one tensor at a time, bit for bit."""
    folder, _ = saved
    config = checks.make_model("soft").config
    save_parts(folder / "four" / "model", config, tmp_path / "model", provenance={"step": 2})
    loaded = from_pretrained(tmp_path / "model").state_dict()
    place = folder / "four" / "model"
    expected = Checkpoint(place.parent, 2, {}, {"model": tensor_specs(place)}).tensors["model"]
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())


def test_refused_if_it_does_not_fit(saved):
    """Another number of experts, another type, a part that is missing or too much: one sentence, and nothing loaded."""
    folder, _ = saved
    place = folder / "four" / "model"
    for model, message in (
        (checks.make_model("soft", num_experts=8), r"experts\.\w+ is \[4, .*\] torch\.float64 there and \[8, "),
        (checks.make_model("soft").float(), r"is \[.*\] torch\.float64 there and \[.*\] torch\.float32 here"),
        (checks.make_model("dense"), r"it has no encoder\.blocks\.0\.mlp\.fc1\.weight, which this one needs"),
        (checks.make_model("soft", blocks=(1,)), r"it has no encoder\.blocks\.0\.mlp\.fc1\.weight"),
    ):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(ValueError, match=message):
            fill(place, model.state_dict())
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    fewer = dict(list(checks.make_model("soft").state_dict().items())[1:])
    with pytest.raises(ValueError, match="which this one does not know"):
        fill(place, fewer)
    with pytest.raises(ValueError, match="there are no tensors at"):
        part_specs(folder / "nothing")


def test_optimizer_state_must_fit(saved):
    """State of a parameter that is not trained here, or of another shape, is refused."""
    found = tensor_specs(saved[0] / "four" / "optimizer")
    optimizer = checks.optimizer_of(checks.make_model("soft"))
    group = next(group for group in optimizer.param_groups if "head.bias" in group["names"])
    place = group["names"].index("head.bias")
    group["names"][place] = "renamed"
    with pytest.raises(ValueError, match=r"optimizer state of 'head\.bias', which this run does not train"):
        optimizer_targets(found, optimizer)
    group["names"][place], group["params"][place] = "head.bias", torch.zeros(3)
    with pytest.raises(ValueError, match=r"head\.bias/.* is \[5\] in the checkpoint and \[3\] in this run"):
        optimizer_targets(found, optimizer)


def test_manifest_names_every_file(saved):
    """Each file of a checkpoint is in its manifest, nothing half written is left beside it."""
    folder, _ = saved
    manifest = json.loads((folder / "four" / "manifest.json").read_text())
    files = {str(path.relative_to(folder / "four")) for path in (folder / "four").rglob("*") if path.is_file()}
    assert files == set(manifest["files"]) | {"manifest.json"}
    assert not list(folder.glob(".partial*"))


def test_damage_is_seen_on_every_rank(saved, tmp_path):
    """A cut file is found by the rank that looks at it and refused by all. A save that fails leaves nothing behind."""
    shutil.copytree(saved[0] / "two", tmp_path / "two")
    victim = sorted((tmp_path / "two" / "model").iterdir())[0]
    victim.write_bytes(victim.read_bytes()[:-8])
    for errors in run_ranks(2, checks.verify_and_fail, tmp_path):
        assert "does not match its manifest" in errors["damaged"]
        assert "rank 1: no room" in errors["failed"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["two"]
