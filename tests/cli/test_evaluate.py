"""`softmoe evaluate`, from a saved model and files to a table and JSON."""

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import softmoe
from softmoe.cli import main
from softmoe.models import create_model


@pytest.fixture
def data(tmp_path):
    """Two classes: dark and light."""
    rng = np.random.default_rng(0)
    for split, count in {"train": 2, "val": 5}.items():
        for name, level in {"dark": 40, "light": 215}.items():
            folder = tmp_path / "data" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = np.clip(rng.normal(level, 10, (20, 24, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return tmp_path / "data"


@pytest.fixture
def model(tmp_path):
    """Tells dark from light by hand-set weights: no position, no mixing, the mean of the patch decides."""
    torch.manual_seed(0)
    model = create_model(
        "vit_ti8", image_size=16, width=8, heads=2, mlp_dim=8, depth=1, num_classes=2, positions="none"
    )
    with torch.no_grad():
        for parameter in model.encoder.blocks.parameters():
            parameter.zero_()
        model.embed.proj.weight[:] = 0.01 * torch.linspace(-1, 1, 8)[:, None, None, None]
        model.embed.proj.bias.zero_()
        model.head.weight[1] = torch.linspace(-1, 1, 8)
        model.head.weight[0] = -model.head.weight[1]
        model.head.bias.zero_()
    softmoe.save_pretrained(model, tmp_path / "model", classes=["dark", "light"])
    return tmp_path / "model"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages go into the test's folder."""
    monkeypatch.chdir(tmp_path)


def test_the_page_is_never_written_over(model, data, tmp_path, capsys):
    """A page by default, numbered if there is one; a file that was chosen must be new, said before the work."""
    for name in ("model_evaluation.html", "model_evaluation_2.html"):
        assert main(["evaluate", str(model), str(data)]) == 0
        assert f"page                       {tmp_path / name}\n" in capsys.readouterr().out
        assert "Classes, the weakest first" in (tmp_path / name).read_text()
    assert main(["evaluate", str(tmp_path / "none"), str(data), "--out", "model_evaluation.html"]) == 2
    assert capsys.readouterr().err == (
        "softmoe: error: model_evaluation.html is there already: choose another --out, or remove it\n"
    )


def test_the_page_is_with_the_model(model, data, tmp_path, monkeypatch, capsys):
    """In the folder of its run, beside a model in no run, nowhere if there is no such folder; never just here."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    shutil.copytree(model, run / "model")
    (run / "metrics.jsonl").touch()
    for where, page in (
        ("../model", "../model_evaluation.html"),
        ("../runs/mine/model", "../runs/mine/evaluation.html"),
        ("../runs/mine", "../runs/mine/evaluation_2.html"),
    ):
        assert main(["evaluate", where, str(data)]) == 0
        assert f"page                       {page}\n" in capsys.readouterr().out
        assert Path(page).is_file()
    monkeypatch.chdir(run / "model")
    assert main(["evaluate", ".", str(data)]) == 0
    assert (run / "evaluation_3.html").is_file()
    monkeypatch.chdir(here)
    assert main(["evaluate", "demo", "shapes?size=48", "--examples", "4"]) == 0
    assert "page                       none: --out FILE.html says where" in capsys.readouterr().out

    def refuse(**_) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    assert main(["evaluate", "../model", str(data)]) == 0
    assert "page                       none: --out FILE.html says where" in capsys.readouterr().out
    assert main(["evaluate", "../model", str(data), "--out", "new.html"]) == 2
    assert "cannot be written to; choose another place" in capsys.readouterr().err
    assert not list(here.iterdir())


def test_table_json_and_file(model, data, tmp_path, capsys):
    """All images right; the JSON says the same as the table and is written where asked."""
    out = tmp_path / "eval.json"
    assert main(["evaluate", str(model), str(data), "--classes", "--batch-size", "3", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "top-1                      100.00%" in text
    assert [line.split() for line in text.splitlines()[-2:]] == [
        ["dark", "5", "5", "5", "100.0%"],
        ["light", "5", "5", "5", "100.0%"],
    ]
    report = json.loads(out.read_text())
    assert report["numbers"]["top1"] == 1.0
    assert report["images"] == 10
    assert report["classes_matched_by"] == "name"
    assert main(["evaluate", str(model), str(data), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["numbers"] == pytest.approx(report["numbers"])


def test_batch_size_does_not_matter(model, data, capsys):
    """Uneven last batches give the same numbers."""
    found = []
    for size in ("1", "4", "100"):
        main(["evaluate", str(model), str(data), "--json", "--batch-size", size])
        found.append(json.loads(capsys.readouterr().out)["numbers"])
    assert found[0] == pytest.approx(found[1], abs=1e-6)
    assert found[0] == pytest.approx(found[2], abs=1e-6)


@pytest.mark.parametrize("form", ["object", "list"])
def test_labels_from_a_file(form, model, data, tmp_path, capsys):
    """ReaL-style labels: any of several is right, an empty list leaves the image out, by name or by number."""
    rows = [[0], [0, 1], [1], [], [0]]  # 0.png, named twice, once dark and once light
    for split in ("dark", "light"):
        for i in reversed(range(5)):
            (data / "val" / split / f"{i}.png").rename(data / "val" / split / f"{split}_{i + 1}.png")
    labels = tmp_path / "real.json"
    if form == "object":
        named = {f"dark_{i + 1}": row for i, row in enumerate(rows)}
        labels.write_text(json.dumps(named | {f"light_{i + 1}": row for i, row in enumerate(rows)}))
    else:
        labels.write_text(json.dumps(rows))
    assert main(["evaluate", str(model), str(data), "--labels", str(labels), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["images"], report["unlabeled"]) == (8, 2)
    assert report["numbers"]["top1"] == pytest.approx((3 + 2) / 8)  # dark: 0, 0|1, 0; light: 0|1, 1
    assert main(["evaluate", str(model), str(data), "--labels", str(labels)]) == 0
    assert "precision@1 (multi-label)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[0]]", "has none for the image"),
        ('{"0": [1]}', "has none for the image"),
        ("[0, 1]", "of lists of class numbers"),
        ("7", "of lists of class numbers"),
        ("[[0", "is not valid JSON"),
        ('{"0": [7], "1": [7], "2": [7], "3": [7], "4": [7]}', "0 to 1"),
    ],
)
def test_wrong_files_of_labels(text, message, model, data, tmp_path, capsys):
    """Images without an entry, other shapes and labels outside the model end in one line."""
    (tmp_path / "real.json").write_text(text)
    assert main(["evaluate", str(model), str(data), "--labels", str(tmp_path / "real.json")]) == 2
    assert message in capsys.readouterr().err


def test_other_sizes_and_splits(model, data, capsys):
    """Another resolution and another split work."""
    arguments = ["--image-size", "24x32", "--split", "train", "--json"]
    assert main(["evaluate", str(model), f"folder:{data}", *arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["images"] == 4
    assert report["preprocessing"]["image_size"] == [24, 32]


def test_unreadable_images_are_named(model, data, capsys):
    """They are left out, listed, and the exit code is 1."""
    (data / "val" / "dark" / "0.png").write_text("no image")
    assert main(["evaluate", str(model), str(data)]) == 1
    text = capsys.readouterr().out
    assert "unreadable: val/dark/0.png" in text
    assert text.splitlines()[0].split() == ["images", "9"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{model}", "shapes"], "classes, but the model has 2"),
        (["{model}", "{data}", "--split", "test"], "has no folder 'test'"),
        (["{tmp}/none", "{data}"], "there is no folder"),
        (["{data}", "{data}"], "is not a saved model"),
        (["{model}", "{data}", "--image-size", "big"], "--image-size must be pixels"),
        (["{model}", "{data}", "--device", "tpu9"], "cannot be used here"),
    ],
)
def test_mistakes_are_one_line(arguments, message, model, data, tmp_path, capsys):
    """Each ends in one line and exit code 2."""
    filled = [a.format(model=model, data=data, tmp=tmp_path) for a in arguments]
    assert main(["evaluate", *filled]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_run_folder(model, data, tmp_path, capsys):
    """MODEL may be a run that holds its model in model/; nothing else of the run is needed."""
    (tmp_path / "runs" / "x").mkdir(parents=True)
    model.rename(tmp_path / "runs" / "x" / "model")
    assert main(["evaluate", str(tmp_path / "runs" / "x"), str(data)]) == 0
    assert "100.00%" in capsys.readouterr().out


def test_from_python(model, data):
    """One line gives the same numbers."""
    report = softmoe.evaluate.evaluate(model, str(data))
    assert report["numbers"]["top1"] == 1.0


def test_prepared_weights(data, tmp_path, capsys):
    """`--weights` evaluates the prepared model; `--agreement` says how often it chooses as the saved one does."""
    made = create_model("soft_ti8_2e", image_size=16, width=8, heads=2, mlp_dim=8, depth=2, num_classes=2)
    torch.nn.init.normal_(made.head.weight)
    softmoe.save_pretrained(made, tmp_path / "soft", classes=["dark", "light"])
    assert main(["evaluate", str(tmp_path / "soft"), str(data), "--weights", "float32", "--agreement"]) == 0
    assert "agrees with saved weights  100.00%" in capsys.readouterr().out
    reports = []
    for options in ([], ["--weights", "float16"]):
        assert main(["evaluate", str(tmp_path / "soft"), str(data), "--json", *options]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    assert [report["weights"] for report in reports] == ["as saved", "float16"]
    assert reports[1]["numbers"]["loss"] == pytest.approx(reports[0]["numbers"]["loss"], rel=1e-3)
    assert "agreement" not in reports[1]["numbers"]


def test_a_dense_model_has_no_experts_to_store(model, data, capsys):
    """Asking for int8 where there is nothing to store so is an error, not silence."""
    assert main(["evaluate", str(model), str(data), "--weights", "int8"]) == 2
    assert "no experts" in capsys.readouterr().err
