"""`softmoe fewshot` on generated shapes."""

import json

import pytest

import softmoe
from softmoe.cli import main
from softmoe.models import create_model

DATA = "shapes?size=16&classes=downstream"
FEW = ["--shots", "1", "2", "--seeds", "2", "--train-examples", "900", "--test-examples", "60"]


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("SOFTMOE_CACHE", str(tmp_path / "cache"))
    made = create_model("soft_ti8_2e", image_size=16, num_classes=None, width=16, heads=2, mlp_dim=16, depth=1)
    softmoe.save_pretrained(made, tmp_path / "model", preprocessing={"image_size": [16, 16], "crop": "resize"})
    return tmp_path / "model"


def test_report_says_the_protocol(model, capsys):
    """Both protocols run on the cached features; the table says how the penalty was chosen."""
    assert main(["fewshot", str(model), DATA, *FEW]) == 0
    honest = capsys.readouterr().out
    assert "1-shot" in honest
    assert "mean of 2 seeds; penalty chosen by leave-one-out" in honest
    assert main(["fewshot", str(model), DATA, *FEW, "--protocol", "paper"]) == 0
    assert "by test accuracy, as in the paper: optimistic (--protocol paper)" in capsys.readouterr().out


def test_json_with_all_evaluators(model, tmp_path, capsys):
    """Neighbors and probe come from the same features; every number has its origin beside it."""
    out = tmp_path / "fewshot.json"
    assert main(["fewshot", str(model), DATA, *FEW, "--knn", "--linear", "--json", "--out", str(out)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(out.read_text())
    assert report["images"] == {DATA: {"train": 900, "test": 60}}
    assert report["fewshot"]["numbers"].keys() == {f"{DATA}/1shot", f"{DATA}/2shot"}
    assert 0 <= report["knn"][DATA]["top1"] <= 1
    assert 0 <= report["linear_probe"][DATA]["top1"] <= 1
    assert report["model_fingerprint"]
    assert len(list((tmp_path / "cache" / "features").iterdir())) == 2


def test_no_cache(model, tmp_path, capsys):
    """--no-cache leaves nothing behind."""
    assert main(["fewshot", str(model), DATA, *FEW, "--no-cache"]) == 0
    assert not (tmp_path / "cache").exists()


def test_several_data_sets(model, capsys):
    """Each has its lines."""
    other = "shapes?size=16&classes=downstream&seed=1"
    assert main(["fewshot", str(model), DATA, other, *FEW, "--protocol", "paper", "--knn"]) == 0
    text = capsys.readouterr().out
    assert f"{DATA}: 900 training and 60 test images" in text
    assert f"{other}: 900" in text
    assert text.count("knn") == 2


def test_too_few_examples(model, capsys):
    """Classes without an example are an error that says what to do."""
    arguments = ["--train-examples", "10", "--test-examples", "10"]
    assert main(["fewshot", str(model), DATA, *arguments]) == 2
    assert "use more training examples" in capsys.readouterr().err
