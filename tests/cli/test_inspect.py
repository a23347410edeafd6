"""`softmoe inspect`, from a saved model and files to figures, numbers and a page."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import softmoe
from softmoe.cli import main
from softmoe.inspection.api import Inspect
from softmoe.models import create_model

NAMES = ("<img src=x onerror=alert(1)>", "'\"&")


@pytest.fixture
def data(tmp_path):
    rng = np.random.default_rng(0)
    for name in NAMES:
        folder = tmp_path / "data" / "val" / name
        folder.mkdir(parents=True)
        for i in range(3):
            Image.fromarray(rng.integers(0, 256, (20, 24, 3)).astype(np.uint8)).save(folder / f"{i}.png")
    return tmp_path / "data"


def saved(folder, name="soft_ti4_3e", **changes):
    torch.manual_seed(0)
    options = {"image_size": (16, 20), "width": 8, "heads": 2, "mlp_dim": 8, "depth": 2, "num_classes": 2} | changes
    softmoe.save_pretrained(create_model(name, **options), folder, classes=NAMES)
    return str(folder)


def test_everything_is_written(tmp_path, data, capsys):
    """Figures, inspect.json and inspect.html, with the model compared; hostile class names stay text."""
    out = tmp_path / "out"
    models = saved(tmp_path / "one"), saved(tmp_path / "two", "experts_choice_ti4_3e", pool="class")
    arguments = [models[0], str(data), "--compare", models[1], "--out", str(out), "--images", "2", "--batch-size", "4"]
    assert main(["inspect", *arguments]) == 0
    text = capsys.readouterr().out
    assert "one: 6 images" in text
    assert str(out / "inspect.html") in text
    report = json.loads((out / "inspect.json").read_text())
    assert [model["images"] for model in report["models"]] == [6, 6]
    soft, sparse = (next(iter(model["layers"].values())) for model in report["models"])
    assert (soft["tokens"], soft["kind"]) == (20, "dense")
    assert (sparse["tokens"], sparse["kind"]) == (21, "sparse")
    assert (out / "figures" / "contributions.svg").is_file()
    assert (out / "figures" / "model_2" / "dropping.png").is_file()
    page = (out / "inspect.html").read_text()
    assert "<img src=x" not in page
    assert page.count("<script") == 2


def test_statistics_do_not_depend_on_the_batch(tmp_path, data, capsys):
    """Batches of one and of all give the same numbers."""
    model = saved(tmp_path / "one")
    found = []
    for size in ("1", "6"):
        out = tmp_path / size
        assert main(["inspect", model, str(data), "--out", str(out), "--images", "0", "--batch-size", size]) == 0
        found.append(json.loads((out / "inspect.json").read_text())["models"][0]["layers"])
    one, all_ = (next(iter(layers.values())) for layers in found)
    for key in ("mean_largest", "entropy", "effective"):
        assert one["dispatch"][key] == pytest.approx(all_["dispatch"][key], rel=1e-5)
    assert one["importance"]["experts"] == pytest.approx(all_["importance"]["experts"], rel=1e-5)


@pytest.mark.parametrize(("loss", "share"), [("softmax", "50%"), ("sigmoid", "95%")])
def test_probabilities_are_those_of_the_loss(tmp_path, data, loss, share):
    """A model that was trained with a sigmoid for each class gives every class a chance by itself."""
    model = create_model("soft_ti4_3e", image_size=16, width=8, heads=2, mlp_dim=8, depth=2, num_classes=2)
    torch.nn.init.constant_(model.head.bias, 3.0)
    softmoe.save_pretrained(model, tmp_path / "m", classes=NAMES, provenance={"loss": loss})
    (found,), _ = Inspect(str(tmp_path / "m"), str(data), images=1, out=tmp_path / "out").run()
    assert found.samples[0].prediction.endswith(f"({share})")


def test_nothing_is_written_over(tmp_path, data, capsys, monkeypatch):
    """A folder with something in it is refused before any work; without --out the next free number is taken."""
    monkeypatch.chdir(tmp_path)
    words = ["inspect", saved(tmp_path / "one"), str(data), "--images", "0"]
    assert main([*words, "--out", str(data)]) == 2
    assert f"{data} is there already: choose another --out, a new or an empty folder" in capsys.readouterr().err
    assert [path.name for path in data.iterdir()] == ["val"]
    for name in ("inspect", "inspect_2"):
        assert main(words) == 0
        assert f"{name}/inspect.html\n" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    assert main([*words, "--out", "empty"]) == 0
    assert (tmp_path / "empty" / "inspect.html").is_file()


def test_mistakes(tmp_path, data, capsys):
    """A model without experts and a number that cannot be are one line each."""
    dense = saved(tmp_path / "dense", "vit_ti4")
    assert main(["inspect", dense, str(data), "--out", str(tmp_path / "o")]) == 2
    assert "this model has no MoE layers" in capsys.readouterr().err
    assert main(["inspect", saved(tmp_path / "m"), str(data), "--out", str(tmp_path / "o"), "--images", "-1"]) == 2
    assert "must not be negative" in capsys.readouterr().err
