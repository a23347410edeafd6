"""`softmoe doctor`, on a run and on saved models."""

import json
from dataclasses import replace

import pytest
import torch

import softmoe
from softmoe.cli import main
from softmoe.inspection.api import run_verdicts
from softmoe.models import create_model
from softmoe.recipes import quickstart
from softmoe.train import train
from softmoe.train.folder import load_run


@pytest.fixture
def run(tmp_path):
    config = quickstart.tiny()
    config = replace(config, runs=str(tmp_path), run_name="run", log=replace(config.log, quiet=True))
    return train(config).folder.path


def saved(folder, scale=8.0, name="soft_ti4_3e"):
    torch.manual_seed(0)
    model = create_model(name, image_size=16, width=8, heads=2, mlp_dim=8, depth=2, num_classes=2, scale_init=scale)
    softmoe.save_pretrained(model, folder)
    return str(folder)


def test_a_run(run, capsys):
    """Weights, images, course and machine are all looked at, without naming data."""
    code = main(["doctor", str(run), "--images", "8", "--json"])
    found = json.loads(capsys.readouterr().out)
    checks = {v["check"]: v["wrong"] for v in found["verdicts"]}
    expected = {"bfloat16 on this CPU", "uniform dispatch", "skipped steps", "gradient spikes", "data loading"}
    assert expected <= checks.keys()
    assert checks["gradient spikes"] is None  # two steps are too few
    (accuracy,) = (v for v in found["verdicts"] if v["check"] == "accuracy")
    assert accuracy["wrong"] is None
    assert accuracy["figure"].endswith("; too early to judge before step 100")
    assert code == (1 if any(checks.values()) else 0)
    assert found["wrong"] == sum(value is True for value in checks.values())


def test_loading_is_judged_with_the_workers_of_the_run(run, monkeypatch):
    """A run on the automatic device has the workers of the device that it finds, here a processor."""
    settings = json.loads((run / "config.json").read_text())
    settings["train"]["device"], settings["train"]["data"]["workers"] = "auto", "auto"
    (run / "config.json").write_text(json.dumps(settings))
    asked = []
    monkeypatch.setattr("softmoe.train.data.workers_for", lambda device: asked.append(device) or 1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    run_verdicts(load_run(run))
    assert asked == ["cpu"]


def test_a_model(tmp_path, capsys):
    """Nothing wrong is exit code 0, something is 1, in words with figure, limit and advice."""
    assert main(["doctor", saved(tmp_path / "good"), "shapes?size=16", "--images", "8"]) == 0
    assert "nothing is wrong" in capsys.readouterr().out
    assert main(["doctor", saved(tmp_path / "bad", scale=1e4), "shapes?size=16", "--images", "8"]) == 1
    text = capsys.readouterr().out
    assert "WRONG  saturated dispatch: mean largest weight" in text
    assert "(limit: at most 0.950)" in text
    assert "lower the learning rate" in text


def test_what_cannot_be_checked_is_said(tmp_path, run, capsys):
    """No data, no experts, data that is gone: a dash and the reason, never a failure."""
    assert main(["doctor", saved(tmp_path / "m")]) == 0
    assert "-      routing on images: no data was given" in capsys.readouterr().out
    torch.manual_seed(0)
    dense = create_model("vit_ti4", image_size=16, width=8, heads=2, mlp_dim=8, depth=1, num_classes=2)
    softmoe.save_pretrained(dense, tmp_path / "dense")
    assert main(["doctor", str(tmp_path / "dense")]) == 0
    assert "this model has no MoE layers" in capsys.readouterr().out
    settings = json.loads((run / "config.json").read_text())
    settings["train"]["data"]["train"] = f"folder:{tmp_path / 'gone'}"
    (run / "config.json").write_text(json.dumps(settings))
    main(["doctor", str(run)])
    text = capsys.readouterr().out
    assert text.count("the run's images cannot be opened") == 2
    assert main(["doctor", str(run), "folder:/gone"]) == 2
