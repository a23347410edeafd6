"""The model that comes inside the package, and the command that shows it."""

import hashlib
import json
from pathlib import Path

import pytest

import softmoe
from softmoe.cli import main
from softmoe.recipes import demo
from softmoe.storage import open_saved


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pictures it was not trained on are recognized, and page and pictures are where the output says."""
    assert main(["demo", "--out", "shown", "--pictures", "3"]) == 0
    said = capsys.readouterr().out
    assert "3 of 3 right, of 288 classes" in said
    page = tmp_path / "shown" / "inspect.html"
    assert str(page) in said
    assert "taken for" in page.read_text()
    assert len(list((tmp_path / "shown" / "pictures").glob("*.png"))) == 3


def test_a_second_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It goes to a folder of its own, which the output names, and the first stays as it was."""

    def first() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in (tmp_path / "softmoe_demo").rglob("*.*")}

    assert main(["demo", "--pictures", "2"]) == 0
    assert "softmoe predict demo softmoe_demo/pictures/1.png" in capsys.readouterr().out
    before = first()
    assert len(before) == 3
    assert main(["demo", "--pictures", "1"]) == 0
    said = capsys.readouterr().out
    assert "softmoe predict demo softmoe_demo_2/pictures/1.png" in said
    assert str(tmp_path / "softmoe_demo_2" / "inspect.html") in said
    assert first() == before


def test_a_folder_of_that_name(capsys: pytest.CaptureFixture[str]) -> None:
    """The model inside the package is shown into, and taken beside, a folder that is called demo and holds no model."""
    for out in ("demo", "beside"):
        assert main(["demo", "--out", out, "--pictures", "3"]) == 0
        assert "3 of 3 right" in capsys.readouterr().out
    assert main(["predict", "demo", "demo/pictures/1.png"]) == 0


def test_small_and_as_it_was_trained() -> None:
    """Below a megabyte with its settings, by the recipe of its name, with the hash that its settings state."""
    saved = open_saved("demo")
    assert sum(file.stat().st_size for file in saved.folder.iterdir()) < 1_000_000
    weights = (saved.folder / "model.safetensors").read_bytes()
    assert saved.files["model.safetensors"].sha256 == hashlib.sha256(weights).hexdigest()
    assert saved.provenance["command"] == "softmoe train demo"
    assert saved.provenance["step"] == demo.STEPS
    assert saved.config == demo.recipe().model.resolve(288, demo.IMAGE)


def test_a_model_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands and from_pretrained know it; what it scores is what its card says, within the noise."""
    assert main(["cost", "demo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["demo"]["params"] == sum(
        p.numel() for p in softmoe.from_pretrained("demo").parameters()
    )
    assert softmoe.from_pretrained("demo").config == open_saved("demo").config
    assert main(["evaluate", "demo", "shapes?size=48", "--examples", "400", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["numbers"]["top1"] == pytest.approx(0.899, abs=0.05)
    assert main(["finetune", "demo", "shapes?size=48&classes=downstream", "--image-size", "60", "--dry-run"]) == 0


def test_a_folder_of_that_name_comes_first() -> None:
    """A user's own folder called demo is the one that is meant."""
    model = softmoe.create_model("vit_ti16", image_size=32, width=32, heads=1, depth=1, num_classes=3)
    softmoe.save_pretrained(model, "demo")
    assert softmoe.from_pretrained("demo").config == model.config
