"""softmoe upcycle, soup and finetune, on real files."""

import io
import json
import tarfile
from pathlib import Path

import pytest
import torch
from convert.plain import PlainViT, timm_names
from PIL import Image
from safetensors.torch import load_file, save_file

from softmoe import cost, save_pretrained
from softmoe.cli import main
from softmoe.convert import from_pretrained
from softmoe.models import VisionTransformer, ViTConfig
from softmoe.storage import open_saved

SHAPE = ViTConfig(image_size=16, patch_size=4, width=16, depth=2, mlp_dim=16, heads=2, num_classes=7)
SETTINGS = {"steps": 2, "data.batch-size": 4, "data.workers": 0, "schedule.warmup": 0, "evaluation.examples": 8}
QUICK = [word for key, value in SETTINGS.items() for word in (f"--{key}", str(value))] + ["--log.quiet", "True"]


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    save_pretrained(VisionTransformer(SHAPE), tmp_path / "dense", classes=[f"c{i}" for i in range(7)])
    return tmp_path / "dense"


def test_upcycle(dense: Path, tmp_path: Path, capsys):
    """Reports the distance, saves the model with its classes; with data the routers start near."""
    out = tmp_path / "soft"
    command = ["upcycle", str(dense), "--experts", "4", "--slots", "2", "--out", str(out)]
    assert main([*command, "--data", "shapes?size=16", "--images", "8", "--blocks", "0,1"]) == 0
    text = capsys.readouterr().out
    assert "distance from the dense model, on 8 images:" in text
    assert "why:" in text
    saved = open_saved(out)
    assert saved.config.moe is not None
    assert (saved.config.moe.num_experts, saved.config.moe.router.slots_per_expert) == (4, 2)
    assert (saved.config.moe_blocks, saved.classes) == ((0, 1), tuple(f"c{i}" for i in range(7)))
    assert saved.provenance["upcycled_from"] == str(dense)
    assert saved.config.moe.keep_mlp
    assert main(["upcycle", str(dense)]) == 0
    text = capsys.readouterr().out
    assert "start beside: 16 experts" in text
    assert "random noise" in text
    assert "nothing was saved: --out FOLDER saves the model" in text
    compare = ["upcycle", str(dense), "--experts", "4", "--init", "compare", "--data", "shapes?size=16"]
    assert main([*compare, "--out", str(tmp_path / "none")]) == 0
    shown = capsys.readouterr()
    assert "nothing was saved: compare only compares" in shown.out
    assert not (tmp_path / "none").exists()
    assert "recommended: beside" in shown.out
    assert "block 1: setting the router" in shown.err


def test_upcycle_others_weights(tmp_path: Path, capsys):
    """A safetensors file in timm's naming, with what it does not tell; the identity router shows that it is exact."""
    state = {name: value.float().contiguous() for name, value in timm_names(PlainViT(gelu="none")).items()}
    save_file(state, tmp_path / "model.safetensors")
    command = [
        "upcycle",
        str(tmp_path / "model.safetensors"),
        "--experts",
        "3",
        "--router",
        "identity",
        "--init",
        "copy",
    ]
    assert main(command) == 2
    assert "give mean and std" in capsys.readouterr().err
    command += ["--mean", "0.5", "--std", "0.5"]
    assert main(command) == 2
    assert "give heads=" in capsys.readouterr().err
    assert main([*command, "--heads", "2", "--out", str(tmp_path / "out")]) == 0
    assert "features    0.0000" in capsys.readouterr().out
    assert from_pretrained(tmp_path / "out").config.heads == 2


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--blocks", "odd"], "--blocks must be last_half or block numbers"),
        (["--init", "closest"], "give images="),
        (["--heads", "2"], "heads can be given for files of others' weights only"),
        (["--device", "gpu"], "the device 'gpu' cannot be used here"),
    ],
)
def test_upcycle_mistakes(dense: Path, extra: list[str], words: str, capsys):
    """One line."""
    assert main(["upcycle", str(dense), "--experts", "4", *extra]) == 2
    assert words in capsys.readouterr().err


def test_finetune_and_soup(dense: Path, tmp_path: Path, monkeypatch, capsys):
    """From a saved model to runs at another, not square, size; from the runs to soups, uniform and greedy."""
    monkeypatch.chdir(tmp_path)
    for name, extra in (("a", []), ("b", ["--optim.name", "adamw", "--optim.layer-decay", "0.7"])):
        command = ["finetune", str(dense), "shapes?size=16", "--image-size", "16x24", "--run-name", name]
        assert main([*command, *QUICK, *extra, "--seed", str(len(extra))]) == 0
        saved = open_saved(f"runs/{name}")
        assert saved.config.image_size == (16, 24)
        assert saved.classes is not None
        assert len(saved.classes) > 7
    assert main(["soup", "runs/a", "runs/b", "--out", "uniform"]) == 0
    assert "averaged 2 models into uniform" in capsys.readouterr().out
    greedy = ["soup", "runs/a", "runs/b", "--out", "greedy", "--greedy", "--data", "shapes?size=16", "--examples", "12"]
    assert main(greedy) == 0
    assert "soup of" in capsys.readouterr().out
    assert open_saved("greedy").provenance["soup"] == "greedy"


@pytest.mark.parametrize("upcycled", [False, True])
def test_adapters(dense: Path, tmp_path: Path, monkeypatch, capsys, upcycled: bool):
    """A small folder beside the base, dense or upcycled, that other commands take; all else is the base's."""
    monkeypatch.chdir(tmp_path)
    base = dense
    if upcycled:
        assert main(["upcycle", str(dense), "--experts", "2", "--expert-dim", "3", "--out", "base"]) == 0
        base = Path("base")
    command = ["finetune", str(base), "shapes?size=16", "--adapters", "--run-name", "a", "--schedule.peak", "0.1"]
    assert main([*command, *QUICK, "--evaluation.every", "2"]) == 0  # experts learn once the head is not zero
    saved = open_saved("runs/a")
    assert saved.config.moe is not None
    assert (saved.config.moe.keep_mlp, saved.config.moe.num_experts) == (True, 2 if upcycled else 16)
    trained, start = from_pretrained("runs/a"), from_pretrained(dense)
    kept = trained.state_dict()["encoder.blocks.1.mlp.mlp.fc1.weight"]
    assert torch.equal(kept, start.state_dict()["encoder.blocks.1.mlp.fc1.weight"])
    assert trained.encoder.blocks[1].mlp.experts.w2.abs().sum() > 0
    capsys.readouterr()
    assert main(["evaluate", "runs/a", "shapes?size=16", "--examples", "12"]) == 0
    assert "top-1" in capsys.readouterr().out


def test_adapters_mistakes(dense: Path, tmp_path: Path, capsys):
    """Experts in the place of MLPs have nothing beside them."""
    assert main(["upcycle", str(dense), "--init", "copy", "--experts", "2", "--out", str(tmp_path / "soft")]) == 0
    assert main(["finetune", str(tmp_path / "soft"), "shapes?size=16", "--adapters"]) == 2
    assert "in their place" in capsys.readouterr().err


def test_adapters_of_others_weights(tmp_path: Path, monkeypatch):
    """The base is saved beside the adapters, so that the run is whole without the file and at another place."""
    monkeypatch.chdir(tmp_path)
    state = {name: value.float().contiguous() for name, value in timm_names(PlainViT(dim=64, heads=1)).items()}
    save_file(state, tmp_path / "vit.safetensors")
    weights = "vit.safetensors?mean=0.5&std=0.5"
    start = from_pretrained(weights)
    command = ["finetune", weights, "shapes?size=16", "--adapters", "--run-name", "a", "--image-size", "16", *QUICK]
    assert main(command) == 0
    Path("vit.safetensors").unlink()
    Path("runs").rename("moved")
    for name, value in from_pretrained("moved/a/base").state_dict().items():
        assert torch.equal(value, start.state_dict()[name]), name
    kept = "encoder.blocks.1.mlp.mlp.fc1.weight"
    assert torch.equal(from_pretrained("moved/a").state_dict()[kept], start.encoder.blocks[1].mlp.fc1.weight)
    assert kept not in load_file("moved/a/model/model.safetensors")


def test_finetune_others_weights(tmp_path: Path, monkeypatch, capsys):
    """A file with what it does not tell, and a folder that tells: both start a run; without it, one line asks."""
    monkeypatch.chdir(tmp_path)
    state = {name: value.float().contiguous() for name, value in timm_names(PlainViT(gelu="none")).items()}
    save_file(state, tmp_path / "vit.safetensors")
    given = ["--mean", "0.485,0.456,0.406", "--std", "0.229,0.224,0.225", "--heads", "2"]
    command = ["finetune", "vit.safetensors", "shapes?size=16", "--image-size", "16", *QUICK]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "give mean and std" in error
    assert error.count("\n") == 1
    assert main([*command, *given, "--run-name", "a"]) == 0
    config = {"architecture": "vit", "pretrained_cfg": {"input_size": [3, 12, 12], "mean": [0.5] * 3, "std": [0.5] * 3}}
    (tmp_path / "folder").mkdir()
    save_file(state, tmp_path / "folder" / "model.safetensors")
    (tmp_path / "folder" / "config.json").write_text(json.dumps(config | {"model_args": {"num_heads": 2}}))
    assert main(["finetune", "folder", "shapes?size=16", "--image-size", "16", *QUICK, "--run-name", "b"]) == 0
    assert open_saved("runs/b").config.heads == 2


@pytest.mark.parametrize("options", [["--freeze", "0.5"], ["--adapters"]])
def test_flops_are_those_of_what_is_trained(dense: Path, tmp_path: Path, monkeypatch, capsys, options: list[str]):
    """The plan and the run count the same FLOPs, fewer than those of training the whole model."""
    monkeypatch.chdir(tmp_path)
    command = ["finetune", str(dense), "shapes?size=16", "--run-name", "part", *QUICK, *options]
    assert main([*command, "--dry-run"]) == 0
    planned = float(capsys.readouterr().out.partition(" FLOPs in all")[0].split()[-1])
    assert main(command) == 0
    images, flops = (
        json.loads(Path("runs/part/metrics.jsonl").read_text().splitlines()[-1])[k] for k in ("images", "flops")
    )
    assert flops == pytest.approx(planned, rel=1e-3)
    price = cost(open_saved("runs/part").config)
    assert price.forward_flops < flops / images < 0.8 * price.train_flops


def test_refit_head_is_refused_for_several_labels_an_image(dense: Path, tmp_path: Path, monkeypatch, capsys):
    """At the start, in a dry run too: nothing is trained and no run is left."""
    monkeypatch.chdir(tmp_path)
    picture = io.BytesIO()
    Image.new("RGB", (16, 16)).save(picture, "PNG")
    for split in ("train", "val"):
        with tarfile.open(f"{split}.tar", "w") as tar:
            for number in range(4):
                labels = json.dumps({"label": [number % 2, 2]}).encode()
                for ending, data in (("png", picture.getvalue()), ("json", labels)):
                    member = tarfile.TarInfo(f"{split}{number}.{ending}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    command = ["finetune", str(dense), "wds:{split}.tar", *QUICK, "--objective.loss", "sigmoid"]
    for more in ([], ["--dry-run"]):
        assert main([*command, "--refit-head", "True", *more]) == 2
        assert capsys.readouterr().err.splitlines()[-1] == (
            "softmoe: error: wds:{split}.tar has several labels an image, and a head in closed form takes one: "
            "leave out --refit-head"
        )
    assert not list(Path("runs").iterdir())
    assert main([*command, "--dry-run"]) == 0


def test_finetune_dry_run_and_mistakes(dense: Path, tmp_path: Path, monkeypatch, capsys):
    """The plan without the run; a model and data are needed; greedy needs data."""
    monkeypatch.chdir(tmp_path)
    assert main(["finetune", str(dense), "shapes?size=16", "--image-size=24", "--dry-run"]) == 0
    assert "image_size = 24" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()
    assert main(["finetune", "--help"]) == 0
    for command in (["finetune", str(dense)], ["finetune", str(dense), "shapes", "--image-size"]):
        assert main(command) == 2
    assert main(["soup", str(dense), "--out", "x", "--greedy"]) == 2
    assert "belong together" in capsys.readouterr().err
