"""What practitioners look for: early stopping, balanced classes, few-shot during training, one call, sweeps."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import softmoe
from softmoe.cli import main
from softmoe.data import open_source
from softmoe.evaluate import evaluation_transform
from softmoe.recipes import quickstart
from softmoe.storage import open_saved
from softmoe.train import ObjectiveSection, train
from softmoe.train.log import read_metrics
from softmoe.train.objectives import balance_weights, make_objective

SMALL = [
    "--model.width",
    "16",
    "--model.depth",
    "1",
    "--model.heads",
    "2",
    "--model.mlp-dim",
    "16",
    "--model.blocks",
    "0",
]
SMALL += ["--model.num-experts", "2", "--batch-size", "4", "--workers", "0", "--evaluation.examples", "8", "--quiet"]
SETTINGS = {
    "model.width": 16,
    "model.depth": 1,
    "model.heads": 2,
    "model.mlp_dim": 16,
    "model.blocks": (0,),
    "num_experts": 2,
    "batch_size": 4,
    "workers": 0,
    "evaluation.examples": 8,
    "quiet": True,
}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes, of 12 and 3 images."""
    rng = np.random.default_rng(0)
    for name, level, count in (("dark", 40, 12), ("light", 215, 3)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(count):
            pixels = np.clip(rng.normal(level, 10, (20, 20, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")
    return tmp_path / "photos"


def test_early_stopping(tmp_path: Path):
    """A run ends after so many evaluations without a better one, saves, and stays ended when it is started again."""
    config = quickstart.tiny()
    evaluation = replace(config.evaluation, every=1, patience=3)
    config = replace(config, runs=str(tmp_path), steps=20, evaluation=evaluation, log=replace(config.log, quiet=True))
    values = iter([0.1, 0.5, 0.4, 0.5, 0.3, 0.9])
    evaluators = {"val": lambda model, batches: {"top1": next(values), "top5": 1.0, "loss": 1.0}}
    result = train(config, evaluators=evaluators)
    assert (result.step, result.signal, result.problems) == (5, None, ())
    assert (result.folder.checkpoints / "last").resolve().name == "step_00000005"
    assert (result.folder.checkpoints / "best").resolve().name == "step_00000002"
    assert train(config, evaluators=evaluators).step == 5


def test_balanced_classes(photos: Path):
    """With power 1 both classes weigh the same in sum, with 0 nothing changes, and the mean image counts 1."""
    source = open_source(f"{photos}?val=0", "train")
    assert balance_weights(source, 0.0) is None
    weights = balance_weights(source, 1.0)
    assert weights is not None
    counts = torch.tensor([12.0, 3.0])
    torch.testing.assert_close(weights * counts, torch.tensor([7.5, 7.5]))
    half = balance_weights(source, 0.5)
    assert half is not None
    assert 1 < half[1] / half[0] < weights[1] / weights[0]
    logits_BC, labels = torch.randn(2, 2), torch.tensor([0, 1])
    batch = SimpleNamespace(images=logits_BC, labels=labels)
    weighted, _ = make_objective(ObjectiveSection(), weights)(torch.nn.Identity(), batch)
    losses_B = torch.nn.functional.cross_entropy(logits_BC, labels, reduction="none")
    torch.testing.assert_close(weighted, (losses_B * weights).mean())
    more = torch.nn.functional.pad(logits_BC, (0, 3), value=-torch.inf)  # a head with more outputs than classes
    found, _ = make_objective(ObjectiveSection(), weights)(lambda _: more.clamp(min=-1e9), batch)
    torch.testing.assert_close(found, weighted)
    with pytest.raises(ValueError, match="needs the number of images of each class"):
        balance_weights(open_source("shapes?size=16", "train"), 1.0)


def test_one_call(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """softmoe.train trains from a recipe with settings by name, softmoe.evaluate and predict take its run, finetune
    goes on from it; the rooms of these names are still rooms."""
    monkeypatch.chdir(tmp_path)
    made = softmoe.train("small_data", photos, steps=3, image_size=16, **SETTINGS)
    assert made.step == 3
    assert made.folder.path == Path("runs/small_data")
    report = softmoe.evaluate(made.folder.path, str(photos))
    assert report["images"] == 2
    found, unreadable = softmoe.predict(made.folder.path, photos / "dark")
    assert (len(found), unreadable) == (12, [])
    again = softmoe.finetune(made.folder.path, photos, epochs=1, batch_size=4, workers=0, quiet=True)
    assert again.step == 3
    assert softmoe.train.TrainConfig is type(quickstart.recipe())
    with pytest.raises(ValueError, match="there is no setting 'colour'"):
        softmoe.train("small_data", photos, colour=3)


def test_numbers_are_those_of_the_saved_model(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """softmoe.train returns the evaluation of the best step, which is the saved model's, not of the last."""
    monkeypatch.chdir(tmp_path)
    values = iter([0.1, 0.9, 0.2])
    evaluators = {"val": lambda model, batches: {"top1": next(values), "top5": 1.0, "loss": 1.0}}
    monkeypatch.setattr("softmoe.cli.train.more_evaluators", lambda config: evaluators)
    every = {"evaluation.every": 1}
    made = softmoe.train("small_data", photos, steps=3, image_size=16, **SETTINGS, **every)
    assert made.numbers["val/top1"] == 0.9
    assert open_saved(made.folder.path).provenance["results"] == made.numbers


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"stepz": 3}, "there is no setting 'stepz', did you mean 'steps'"),
        ({"flip": "no"}, r"data\.transform\.flip must be .*bool.*'no'"),
        ({"seed": 1.5}, r"seed must be .*int.*1\.5"),
        ({"steps": "3"}, "steps must be .*int.*'3'"),
        ({"epochs": "3"}, "the number of epochs must be above 0, got '3'"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
    ],
)
def test_wrong_settings_in_python(photos: Path, tmp_path: Path, wrong: dict, sentence: str, monkeypatch):
    """Names, types and values are looked at before anything is written, as on the command line."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=sentence):
        softmoe.train("small_data", photos, **SETTINGS | wrong)
    assert not (tmp_path / "runs").exists()


def test_unreadable_validation_images_are_told_once(photos: Path, tmp_path: Path, monkeypatch, capsys):
    """The first evaluation says how many images it left out and names one; later ones do not say it again."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(photos, tmp_path / "split" / "train")
    shutil.copytree(photos, tmp_path / "split" / "val")
    for number in (3, 5):
        (tmp_path / "split" / "val" / "dark" / f"{number}.png").write_bytes(b"no picture")
    every = {"evaluation.every": 1, "evaluation.examples": None}
    softmoe.train("small_data", tmp_path / "split", steps=3, image_size=16, **SETTINGS | every)
    (said,) = re.findall(r".*left out.*", capsys.readouterr().err)
    assert said.startswith("step 1: validation images left out because they cannot be read: 2; the first is ")
    assert "val/dark/3.png: " in said


def test_what_outputs_mean_is_saved(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A model that was trained with a loss of each class by itself is evaluated by it, and predicts chances that do not
    add up to 1."""
    monkeypatch.chdir(tmp_path)
    made = softmoe.train("small_data", photos, steps=3, image_size=16, **SETTINGS, **{"objective.loss": "sigmoid"})
    report = softmoe.evaluate(made.folder.path, str(photos))
    assert report["numbers"]["loss"] == pytest.approx(made.numbers["val/loss"], rel=1e-4)
    assert softmoe.evaluate(made.folder.path, str(photos), loss="softmax")["numbers"]["loss"] != pytest.approx(
        made.numbers["val/loss"], rel=1e-4
    )
    (found, *_), _ = softmoe.predict(made.folder.path, photos / "dark")
    model = softmoe.from_pretrained(made.folder.path)
    transform = evaluation_transform(open_saved(made.folder.path).preprocessing)
    pixels = transform(np.asarray(Image.open(found.name).convert("RGB")), np.random.default_rng(0))
    with torch.no_grad():
        chances = model(pixels[None]).sigmoid()[0].sort(descending=True).values
    assert [share for _, share in found.top] == pytest.approx(chances.tolist(), rel=1e-4)


def test_few_shot_during_training(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Every evaluation has the 10-shot accuracy on other data among its numbers."""
    few = ["--evaluation.fewshot", "shapes?size=16&classes=downstream&length=300"]
    command = ["train", "quickstart", "--runs", str(tmp_path), "--steps", "2", "--evaluation.every", "1", *SMALL, *few]
    assert main(command) == 0
    rows = [row for row in read_metrics(tmp_path / "quickstart" / "metrics.jsonl") if "fewshot/10shot" in row]
    assert len(rows) == 2
    assert all(0.0 <= row["fewshot/10shot"] <= 1.0 for row in rows)


@pytest.mark.slow
def test_sweep(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    """A run for each combination, one table; done ones are not done again."""
    command = ["sweep", "small_data", "lr=1e-3,1e-2", "seed=0,1", "--data", str(photos), "--runs", str(tmp_path / "r")]
    command += ["--steps", "2", "--image-size", "16", *SMALL]
    assert main([*command, "--dry-run"]) == 0
    assert not (tmp_path / "r").exists()
    capsys.readouterr()
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "run 4 of 4" in out
    table = out[out.index("\nlr ") :]
    assert re.findall(r"^(1e-\d)\s+(\d)\s", table, re.MULTILINE) == [
        ("1e-3", "0"),
        ("1e-3", "1"),
        ("1e-2", "0"),
        ("1e-2", "1"),
    ]
    assert {path.name for path in (tmp_path / "r").iterdir() if path.is_dir()} == {
        f"small_data_lr_{lr}_seed_{seed}" for lr in ("1e-3", "1e-2") for seed in (0, 1)
    }
    assert (tmp_path / "r" / "sweep.html").exists()
    assert main(["sweep", "small_data"]) == 2
    assert main([*command, "--run-name", "mine", "--dry-run"]) == 0
    assert f"run 1 of 4: {tmp_path / 'r' / 'mine_lr_1e-3_seed_0'}" in capsys.readouterr().out
