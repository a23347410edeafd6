"""The commands for images and texts, from captions to a page."""

import json
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import save_file
from two_towers import save

from softmoe import save_pretrained
from softmoe.cli import main
from softmoe.convert import to_timm
from softmoe.data import open_source
from softmoe.evaluate import load_towers
from softmoe.models import create_model

OPTIONS = [
    *("--steps", "2", "--text.width", "16", "--text.depth", "1", "--text.heads", "2", "--text.mlp-dim", "16"),
    *("--text.vocab-size", "400", "--text.embed-dim", "8", "--data.batch-size", "4", "--data.workers", "0"),
    *("--schedule.warmup", "0", "--evaluation.examples", "8", "--log.quiet", "True"),
]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SOFTMOE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(save(tmp_path_factory.mktemp("models") / "model"))


def test_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Train and show; data without captions and unknown words are refused."""
    out = tmp_path / "new" / "t.model"
    assert main(["tokenizer", "train", "shapes", "--size", "400", "--examples", "100", "--out", str(out)]) == 0
    assert "tokens in" in capsys.readouterr().out
    assert main(["tokenizer", "show", str(out), "A red STAR"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "a red star"
    assert main(["tokenizer", "learn"]) == 2
    assert main(["tokenizer", "train", "idx:nowhere"]) == 2
    assert main(["tokenizer"]) == 2


def test_lit(tmp_path: Path, capsys: pytest.CaptureFixture):
    """`softmoe train lit --image MODEL` locks that model, with its size and preprocessing, and saves two towers."""
    start = tmp_path / "classifier"
    tower = create_model("soft_ti8_2e", image_size=16, num_classes=4, width=16, heads=2, mlp_dim=16, depth=2)
    save_pretrained(tower, start, preprocessing={"image_size": (16, 16), "crop": "resize"})
    data = ["--data.train", "shapes?size=16&length=8", "--runs", str(tmp_path)]
    assert main(["train", "lit", "--image", str(start), *data, *OPTIONS]) == 0
    assert list((tmp_path / "cache" / "features").iterdir())
    towers = load_towers(tmp_path / "lit")
    assert towers.preprocessing.crop == "resize"
    assert (towers.saved.provenance["weights"], towers.model.config.embed_dim) == (str(start), 8)
    state = tower.state_dict()
    assert all((value == state[name]).all() for name, value in towers.model.image.state_dict().items())
    assert main(["train", "lit", "--image", str(start), *data, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "image tower: " in said
    assert "text tower: " in said
    assert main(["train", str(tmp_path / "lit"), "--log.quiet", "True"]) == 0


def test_lit_of_a_file_of_others(tmp_path: Path, capsys: pytest.CaptureFixture):
    """A file under timm's names says nothing of mean and std: --mean and --std do, as in finetune."""
    shape = {"image_size": 16, "width": 16, "heads": 2, "mlp_dim": 64, "depth": 1, "num_classes": 4}
    save_file(to_timm(create_model("vit_ti8", **shape, qk_norm=False))[0], tmp_path / "vit.safetensors")
    argv = ["train", "lit_small", "--image", str(tmp_path / "vit.safetensors"), "--data", "shapes?size=16", "--dry-run"]
    assert main(argv) == 2
    assert "give mean and std" in capsys.readouterr().err
    assert main([*argv, "--mean", "0.5", "--std", "0.5", "--heads", "2"]) == 0
    assert "text tower:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["lit"], "give the trained model whose images get texts: softmoe train lit --image MODEL"),
        (["lit", "--image", "nowhere"], "there is no folder nowhere"),
        (["quickstart", "--image", "x"], "--image is for recipes with a text tower"),
        (["lit", "--image"], "--image needs a value"),
    ],
)
def test_lit_mistakes(argv, words, capsys):
    """One line each."""
    assert main(["train", *argv]) == 2
    assert words in capsys.readouterr().err


def test_zeroshot(model, tmp_path: Path, capsys: pytest.CaptureFixture):
    """Numbers beside chance, as a line and as JSON; templates from a file."""
    data = "shapes?size=16&classes=downstream&length=104"
    assert main(["zeroshot", model, data]) == 0
    assert "(chance 0.96%)" in capsys.readouterr().out
    (tmp_path / "t.txt").write_text("a {}\n\nsome {}\n")
    out = tmp_path / "z.json"
    assert main(["zeroshot", model, data, "--templates", str(tmp_path / "t.txt"), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(out.read_text())
    assert json.loads(out.read_text())["templates"] == ["a {}", "some {}"]


def test_retrieve(model, capsys: pytest.CaptureFixture):
    """Both ways."""
    assert main(["retrieve", model, "shapes?size=16&length=20"]) == 0
    out = capsys.readouterr().out
    assert out.count("recall@10") == 2
    assert "20 images with 40 captions" in out


def test_search(model, tmp_path: Path, capsys: pytest.CaptureFixture):
    """A page, or JSON; the unreadable are counted."""
    source = open_source("shapes?size=16", "val")
    for k in range(3):
        Image.fromarray(source[k].image).save(tmp_path / f"{k}.png")
    (tmp_path / "bad.jpg").write_bytes(b"x")
    page = tmp_path / "page.html"
    assert main(["search", model, "a red star", str(tmp_path), "--out", str(page), "--top", "2"]) == 0
    shown = capsys.readouterr()
    assert page.read_text().count("<img") == 2
    assert "1 files could not be read" in shown.err
    assert main(["search", model, "a red star", str(tmp_path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["hits"]) == 3


def test_image_commands_work_on_two_towers(model, tmp_path: Path, capsys: pytest.CaptureFixture):
    """inspect, fewshot and predict look at the image tower; evaluate says that there is no head."""
    data = "shapes?size=16&classes=downstream&length=208"
    assert main(["inspect", model, data, "--examples", "8", "--images", "1", "--out", str(tmp_path / "i")]) == 0
    assert (tmp_path / "i" / "inspect.html").is_file()
    assert main(["fewshot", model, data, "--shots", "1", "--seeds", "1"]) == 0
    Image.fromarray(open_source("shapes?size=16", "val")[0].image).save(tmp_path / "a.png")
    assert main(["predict", model, str(tmp_path / "a.png")]) == 0
    assert "16 features" in capsys.readouterr().out
    assert main(["evaluate", model, data]) == 2
    assert "no classification head" in capsys.readouterr().err


def test_models_without_texts(tmp_path: Path, capsys: pytest.CaptureFixture):
    """A classifier cannot be asked with words."""
    tower = create_model("vit_ti8", image_size=16, num_classes=4, width=16, heads=2, mlp_dim=16, depth=1)
    save_pretrained(tower, tmp_path / "model")
    for argv in (["zeroshot", "m", "shapes"], ["retrieve", "m", "shapes"], ["search", "m", "x", str(tmp_path)]):
        if argv[0] == "search":
            Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
        argv[1] = str(tmp_path / "model")
        assert main(argv) == 2
        assert "is a model for images alone; softmoe train lit_small --image" in capsys.readouterr().err
