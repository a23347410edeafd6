"""Files of others' weights, wherever a command takes MODEL."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from softmoe.cli import main
from softmoe.convert import to_timm
from softmoe.evaluate import load
from softmoe.models import create_model
from softmoe.storage.saved import DEMO

COMMANDS = {
    "evaluate": ["photos?val=0.5", "--json"],
    "predict": ["photos", "--json"],
    "fewshot": ["photos?val=0.5", "--shots", "1", "--json"],
    "doctor": [],
    "cost": ["--json"],
    "upcycle": ["--experts", "2", "--blocks", "0"],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dense model under timm's names in a file, which does not tell mean and std, and pictures."""
    root = tmp_path_factory.mktemp("others")
    torch.manual_seed(0)
    model = create_model("vit_ti8", num_classes=2, image_size=16, width=64, heads=1, mlp_dim=32, depth=1)
    torch.nn.init.normal_(model.head.weight)
    save_file({name: tensor.contiguous() for name, tensor in to_timm(model)[0].items()}, root / "vit.safetensors")
    for index in range(8):
        path = root / "photos" / "ab"[index % 2] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (index * 30, 90, 10)).save(path)
    return root


@pytest.mark.parametrize("name", COMMANDS)
def test_mean_and_std_as_options_or_in_the_name(name: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """Both forms do the same; without them the one line names both; with one of our models they are refused."""
    monkeypatch.chdir(place)
    said = []
    for model, more in (
        ("vit.safetensors", ["--mean", "0.5", "--std", "0.5"]),
        ("vit.safetensors?mean=0.5&std=0.5", []),
    ):
        assert main([name, model, *COMMANDS[name], *more]) == 0
        said.append(capsys.readouterr().out.replace("?mean=0.5&std=0.5", ""))
    assert said[0] == said[1] != ""
    assert main([name, "vit.safetensors", *COMMANDS[name]]) == 2
    assert "--mean 0.5 --std 0.5 or FILE?mean=0.5&std=0.5" in capsys.readouterr().err
    assert main([name, str(DEMO), *COMMANDS[name], "--std", "1"]) == 2
    assert "std can be given for files of others' weights only" in capsys.readouterr().err


def test_every_command_with_a_model_has_the_options(capsys):
    """Help names --mean and --std, and MODEL's line others' weights."""
    for name in (*COMMANDS, "export", "inspect", "serve"):
        with pytest.raises(SystemExit):
            main([name, "--help"])
        told = " ".join(capsys.readouterr().out.replace("│", " ").split())
        assert all(word in told for word in ("--mean", "--std", "others' weights"))
    for name in ("finetune", "train"):
        assert main([name, "--help"]) == 0
        assert "--mean" in capsys.readouterr().out


def test_another_mean_is_another_model(place: Path):
    """The mean is a part of the weights: outputs and fingerprints differ, features are not taken for each other."""
    models = [
        load(place / "vit.safetensors", foreign_options={"mean": mean, "std": "0.5"}) for mean in ("0.5", "0.1,0.2,0.3")
    ]
    assert models[0].saved.fingerprint != models[1].saved.fingerprint
    images = torch.rand(2, 3, 16, 16)
    assert not torch.equal(models[0].model(images), models[1].model(images))
    prepared = load(place / "vit.safetensors?mean=0.5&std=0.5", weights="float32")
    torch.testing.assert_close(prepared.model(images), models[0].model(images))
    with pytest.raises(ValueError, match="mapped weights are those of a saved model"):
        load(place / "vit.safetensors?mean=0.5&std=0.5", weights="mapped")


def test_where_a_saved_model_is_needed(place: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """Soups and uploads are made of our folders; the line says how a file becomes one."""
    monkeypatch.chdir(place)
    for words in (["soup", "vit.safetensors", "--out", "soup"], ["upload", "vit.safetensors", "user/name"]):
        assert main(words) == 2
        assert "softmoe finetune and upcycle make one of others' weights" in capsys.readouterr().err
