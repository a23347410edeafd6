"""Where a model may be: a folder, a run, a checkpoint, the Hub."""

import json
import os
import shutil
import sys
import types
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from saved_models import killed_between_renames, refused, tiny

import softmoe
from softmoe.models import VisionTransformer
from softmoe.storage import Preprocessing, load_saved, open_saved
from softmoe.storage.files import PARTIAL, sha256
from softmoe.storage.hub import why_no_model


def test_a_run_folder(saved, tmp_path):
    """A run's exported model is found in its model/."""
    run = tmp_path / "runs" / "x"
    run.mkdir(parents=True)
    saved.rename(run / "model")
    (run / "config.json").write_text("{}")
    assert open_saved(run).folder == run / "model"


@pytest.mark.parametrize("open_one", [open_saved, softmoe.from_pretrained, why_no_model])
@pytest.mark.parametrize("in_a_run", [False, True])
def test_a_kill_while_a_model_is_replaced_loses_nothing(saved, tmp_path, open_one, in_a_run):
    """The model before it gets its name back, whoever looks for it, and the next save leaves nothing of the others."""
    place = saved
    if in_a_run:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "config.json").write_text("{}")
        place = saved.rename(tmp_path / "run" / "model")
    killed_between_renames(place)
    open_one(place.parent if in_a_run else place)
    assert open_saved(place).provenance["step"] == 7
    killed_between_renames(place)
    softmoe.save_pretrained(tiny(), place)
    hidden = [path.name for path in place.parent.iterdir() if path.name.startswith(PARTIAL)]
    assert [name for name in hidden if name.endswith("-old")] == []


def test_a_reader_that_brings_a_model_back_does_not_stop_the_save(saved, monkeypatch):
    """Between the two renames of a living process somebody may look for the model: the new one is put there again."""
    rename, seen = os.rename, []

    def meddled(old, new):
        if PARTIAL in str(old) and not str(old).endswith("-old") and not seen:
            seen.append(open_saved(saved).folder)
        rename(old, new)

    monkeypatch.setattr(os, "rename", meddled)
    softmoe.save_pretrained(tiny(), saved, provenance={"step": 8})
    assert seen == [saved]
    assert open_saved(saved).provenance["step"] == 8
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def checkpoint(folder: Path, model: VisionTransformer, **extra) -> None:
    folder.mkdir(parents=True)
    save_file(model.state_dict(), folder / "model.safetensors")
    for name, other in extra.items():
        save_file(other.state_dict(), folder / f"{name}.safetensors")
    transform = {"image_size": 32, "crop": "inception", "central_ratio": 1.2, "antialias": True, "flip": True}
    run = {"run_name": "x", "data": {"train": "shapes", "transform": transform}, "objective": {"loss": "softmax"}}
    state = {"config": run, "classes": list("abcdefghij")}
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))
    (folder / "state.json").write_text(json.dumps(state))
    state_files(folder)


def state_files(folder: Path) -> None:
    """Write the manifest of what is in a checkpoint now."""
    inside = [p for p in folder.rglob("*") if p.is_file() and p.name != "manifest.json"]
    files = {str(p.relative_to(folder)): {"bytes": p.stat().st_size, "sha256": sha256(p)} for p in inside}
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


@pytest.mark.parametrize(("outputs", "named"), [(10, True), (7, False)])
def test_a_stopped_run_knows_its_classes(outputs: int, named: bool, tmp_path):
    """Their names are in the checkpoint, and are used if there is one for each output."""
    checkpoint(tmp_path / "x" / "checkpoints" / "last", tiny(num_classes=outputs))
    assert open_saved(tmp_path / "x").classes == (tuple("abcdefghij") if named else None)


def write_in_parts(folder: Path, name: str) -> None:
    """Cut the tensors `name` of a checkpoint in two along their first axis, as two processes would write them."""
    whole = load_file(folder / f"{name}.safetensors")
    (folder / f"{name}.safetensors").unlink()
    (folder / name).mkdir()
    for rank in range(2):
        cut = {key: t.tensor_split(2)[rank].clone() for key, t in whole.items() if t.ndim}
        cut |= {key: t for key, t in whole.items() if not t.ndim and not rank}  # every rank keeps scalars, one writes
        start = {key: len(t.tensor_split(2)[0]) * rank for key, t in whole.items() if t.ndim}
        offsets = {key: [start[key], *[0] * (t.ndim - 1)] if t.ndim else [] for key, t in cut.items()}
        info = json.dumps({key: {"saved_offsets": value} for key, value in offsets.items()})
        file = folder / name / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        save_file(cut, file, {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": info})


def test_a_stopped_run_of_many_processes(tmp_path):
    """Its checkpoint is read like any other, joined bit for bit, and the average before the weights."""
    model, average = tiny(), tiny()
    folder = tmp_path / "x" / "checkpoints" / "last"
    checkpoint(folder, model, ema=average)
    for name, wanted in (("model", average), ("ema", average)):
        write_in_parts(folder, name)
        state_files(folder)
        found = softmoe.from_pretrained(tmp_path / "x").state_dict()
        assert found.keys() == wanted.state_dict().keys()
        assert all(torch.equal(value, found[key]) for key, value in wanted.state_dict().items())
    shutil.rmtree(folder / "ema")
    state_files(folder)
    assert torch.equal(softmoe.from_pretrained(tmp_path / "x").head.weight, model.head.weight)
    part = sorted((folder / "model").iterdir())[1]
    shutil.copy(part, part.with_name("another.safetensors"))
    refused(folder, "another.safetensors is not named in the manifest")
    part.with_name("another.safetensors").unlink()
    part.unlink()
    refused(folder, part.name, "is missing")
    state_files(folder)
    refused(folder, "do not fit its config.json: embed.proj.weight is (16, 3, 8, 8)")


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
    with pytest.raises(ValueError, match="is not a saved model"):
        open_saved(tmp_path / "empty")
    refused(tmp_path / "empty", "has no safetensors file")


def test_a_mistyped_run(tmp_path, monkeypatch, saved):
    """Where there are runs, a name that is not among them gets their list and no error of the Hub."""
    monkeypatch.chdir(tmp_path)
    for name in ("alpha", "finetune"):
        shutil.copytree(saved, tmp_path / "runs" / name)
    for where in ("runs/finetun", "finetun"):
        refused(where, f"there is no folder {where}; runs has finetune, alpha")


def test_hub_package_is_absent(monkeypatch):
    """Without huggingface_hub a Hub id says what to install."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refused("user/name", "no folder user/name", "pip install 'softmoe-vit[hub]'")


def test_hub_is_offline(monkeypatch):
    """A failed download is one sentence."""

    def fails(*arguments, **options):
        raise ConnectionError("Cannot reach huggingface.co: offline mode is enabled.\nMore lines")

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=fails))
    refused("user/name", "could not be fetched from the Hub: Cannot reach")


def pickles_among(patterns: list[str]) -> list[str]:
    """The names of weights and code, other than safetensors, that patterns for files on the Hub let through."""
    others = ("pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "model.pkl", "modeling.py")
    return [name for name in others if any(fnmatch(name, pattern) for pattern in patterns)]


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
    assert not pickles_among(asked["patterns"])


def test_hub_upload(monkeypatch, saved, tmp_path):
    """Only a saved model goes up, and only its own files; its card calls it by the name it has there."""
    calls = []
    api = types.SimpleNamespace(
        create_repo=lambda repo_id, **options: calls.append(("create", repo_id)),
        upload_folder=lambda **options: calls.append(("upload", options["folder_path"])) or "https://there",
        upload_file=lambda **options: calls.append((options["path_in_repo"], options["path_or_fileobj"].decode())),
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", api)
    (saved / "README.md").write_text((saved / "README.md").read_text() + "A line of mine.\n")
    assert softmoe.hub.upload(saved, "user/name") == "https://there"
    assert calls[:-1] == [("create", "user/name"), ("upload", str(saved))]
    place, card = calls[-1]
    assert place == "README.md"
    assert "\n# name\n" in card
    assert 'softmoe.from_pretrained("user/name")' in card
    assert "softmoe predict user/name IMAGES" in card
    assert card.endswith("A line of mine.\n")
    with pytest.raises(ValueError, match="is not a saved model"):
        softmoe.hub.upload(tmp_path, "user/name")
    with pytest.raises(ValueError, match="looks like user/name"):
        softmoe.hub.upload(saved, "name")


def test_results_in_the_card(tmp_path):
    """What a model was evaluated to is in its card in the form that the Hub reads: data, metric, value."""
    hub = pytest.importorskip("huggingface_hub")
    results = {"val/top1": 0.75, "val/loss": 0.5}
    softmoe.save_pretrained(
        tiny(), tmp_path / "model", provenance={"run": "mine", "recipe_data": 'photos?"x": y', "results": results}
    )
    card = hub.ModelCard((tmp_path / "model" / "README.md").read_text())
    assert card.data.model_name == "mine"
    assert [(r.dataset_name, r.task_type, r.metric_type, r.metric_value) for r in card.data.eval_results] == [
        ('photos?"x": y', "image-classification", "accuracy", 0.75),
        ('photos?"x": y', "image-classification", "loss", 0.5),
    ]
    softmoe.save_pretrained(tiny(), tmp_path / "plain")
    assert hub.ModelCard((tmp_path / "plain" / "README.md").read_text()).data.eval_results is None


def test_push_to_hub(monkeypatch, tmp_path):
    """A model goes up with its card in one call, and nothing of it stays behind."""
    seen = {}

    def upload_folder(repo_id, folder_path, allow_patterns, token, commit_message):
        seen.update(
            name=repo_id, told=(token, commit_message), files=sorted(p.name for p in Path(folder_path).iterdir())
        )
        assert open_saved(folder_path).classes == ("0", "1", "2", "3", "4")
        assert not pickles_among(allow_patterns)
        return f"https://hub/{repo_id}"

    nothing = lambda *a, **o: None  # noqa: E731
    stand_in = types.SimpleNamespace(create_repo=nothing, upload_folder=upload_folder, upload_file=nothing)
    monkeypatch.setitem(sys.modules, "huggingface_hub", stand_in)
    names = [str(i) for i in range(5)]
    assert softmoe.push_to_hub(tiny(), "user/name", classes=names) == "https://hub/user/name"
    files = ["README.md", "config.json", "model.safetensors"]
    assert seen == {"name": "user/name", "told": (None, None), "files": files}
    said = {"token": "mine", "commit_message": "longer training"}
    assert tiny().push_to_hub("user/other", private=True, classes=names, **said) == "https://hub/user/other"
    assert seen == {"name": "user/other", "told": ("mine", "longer training"), "files": files}


def test_methods_of_a_model(tmp_path):
    """A model saves itself and its class loads it, as those of the Hub's mixin do, to the same bits and facts."""
    model, images = tiny().eval(), torch.randn(2, 3, 32, 32)
    saved = model.save_pretrained(tmp_path / "model", classes=["a", "b", "c", "d", "e"])
    assert open_saved(tmp_path / "model") == saved
    again = softmoe.models.VisionTransformer.from_pretrained(tmp_path / "model")
    assert torch.equal(again(images), model(images))
    compiled = torch.compile(model, backend="eager")
    compiled.save_pretrained(tmp_path / "compiled")
    assert torch.equal(softmoe.from_pretrained(tmp_path / "compiled")(images), model(images))


def test_another_number_of_classes(saved):
    """`num_classes` gives a fresh head where it differs, none for 0, and leaves the features as they are."""
    model, images = softmoe.from_pretrained(saved), torch.randn(2, 3, 32, 32)
    assert torch.equal(softmoe.from_pretrained(saved, num_classes=5)(images), model(images))
    features = model.forward_features(images)
    for number, shape in ((7, (2, 7)), (0, (2, model.num_features))):
        other = softmoe.models.VisionTransformer.from_pretrained(saved, num_classes=number, dtype=torch.float64)
        assert other(images.double()).shape == shape
        assert other.config.num_classes == (number or None)
        assert not any(module.training for module in other.modules())
        torch.testing.assert_close(other.forward_features(images.double()).float(), features, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="num_classes must be at least 0"):
        softmoe.from_pretrained(saved, num_classes=-1)


def test_a_foreign_mixin_takes_the_layer(tmp_path):
    """A module of somebody's own that holds our layer is saved and loaded by the Hub's mixin, weights and all."""
    hub = pytest.importorskip("huggingface_hub")

    class Mine(torch.nn.Module, hub.PyTorchModelHubMixin):
        def __init__(self, dim: int, experts: int):
            super().__init__()
            self.layer = softmoe.SoftMoE(dim, experts)

        def forward(self, x):
            return self.layer(x)

    mine, x = Mine(dim=8, experts=4), torch.randn(2, 5, 8)
    mine.save_pretrained(tmp_path / "mine")
    torch.testing.assert_close(Mine.from_pretrained(tmp_path / "mine")(x), mine(x))
