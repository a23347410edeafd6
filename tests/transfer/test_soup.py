"""Means of weights, and which models go in."""

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from softmoe import save_pretrained
from softmoe.convert import from_pretrained
from softmoe.models import MoEConfig, VisionTransformer, ViTConfig
from softmoe.transfer import Soup, Upcycle
from softmoe.transfer.soups import greedy_soup, soup

SHAPE = ViTConfig(
    image_size=8,
    patch_size=4,
    width=8,
    depth=2,
    mlp_dim=8,
    heads=2,
    num_classes=3,
    moe=MoEConfig.of(num_experts=2),
)


def save(folder: Path, seed: int, shape: ViTConfig = SHAPE, dtype: torch.dtype = torch.float32, **facts) -> Path:
    torch.manual_seed(seed)
    model = VisionTransformer(shape)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    save_pretrained(model.to(dtype), folder, **facts)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_mean_of_all(dtype, tmp_path, monkeypatch):
    """Each tensor is the float64 mean, in the dtype of the models; pieces smaller than a tensor change nothing."""
    monkeypatch.setattr(sys.modules[soup.__module__], "PIECE", 33)
    folders = [save(tmp_path / str(seed), seed, dtype=dtype) for seed in range(3)]
    result = soup(folders, tmp_path / "out")
    states = [from_pretrained(folder).state_dict() for folder in folders]
    for name, found in from_pretrained(tmp_path / "out").state_dict().items():
        expected = torch.stack([state[name].double() for state in states]).mean(0).to(dtype)
        assert found.dtype == dtype
        assert torch.equal(found, expected), name
    assert result.kept == (0, 1, 2)
    assert len(result.saved.provenance["ingredients"]) == 3


def test_one_model_is_itself(tmp_path):
    """Bit for bit, with its classes and preprocessing."""
    folder = save(tmp_path / "a", 0, classes=("x", "y", "z"), preprocessing={"image_size": (8, 8), "crop": "resize"})
    saved = soup([folder], tmp_path / "out").saved
    assert saved.classes == ("x", "y", "z")
    assert saved.preprocessing.crop == "resize"
    before, after = (from_pretrained(f).state_dict() for f in (folder, tmp_path / "out"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_greedy_keeps_what_helps(tmp_path):
    """Against a plain loop over means of state dicts, for several random scores."""
    folders = [save(tmp_path / str(seed), seed) for seed in range(4)]
    states = [from_pretrained(folder).state_dict() for folder in folders]
    for seed in range(3):
        direction = torch.randn(3, generator=torch.Generator().manual_seed(seed))

        def value(bias: torch.Tensor, direction: torch.Tensor = direction) -> float:
            return round(float((bias - direction).square().sum().neg()), 4)

        def mean(which: list[int]) -> torch.Tensor:
            return torch.stack([states[i]["head.bias"].double() for i in which]).mean(0).float()

        alone = [value(mean([i])) for i in range(4)]
        order = sorted(range(4), key=lambda i: -alone[i])
        kept, best = [order[0]], alone[order[0]]
        for i in order[1:]:
            if value(mean([*kept, i])) >= best:
                kept, best = [*kept, i], value(mean([*kept, i]))
        result = greedy_soup(folders, tmp_path / f"out{seed}", lambda model: value(model.head.bias.detach()))
        assert (list(result.kept), result.score, list(result.scores)) == (kept, best, alone)
        assert value(from_pretrained(tmp_path / f"out{seed}").head.bias.detach()) == best
    for folder, state in zip(folders, states, strict=True):  # the files were only read
        again = from_pretrained(folder).state_dict()
        assert all(torch.equal(again[name], value) for name, value in state.items())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"width": 12}, "width is 8 in .* and 12 in"),
        ({"num_classes": 4}, "num_classes is 3 in .* and 4 in"),
        ({"image_size": 12}, r"image size is \(8, 8\) in .* and \(12, 12\)"),
        ({"activation": "gelu"}, "activation is gelu_tanh in .* and gelu in"),
        ({"moe": MoEConfig.of(num_experts=4)}, "num_experts is 2 in .* and 4 in"),
        ({"moe": None}, "router is soft in .* and None in"),
    ],
)
def test_other_architectures_are_refused(change, words, tmp_path):
    """The difference is named, and nothing is written."""
    folders = [save(tmp_path / "a", 0), save(tmp_path / "b", 1, replace(SHAPE, **change))]
    with pytest.raises(ValueError, match=words):
        soup(folders, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"top_k": 2}, "top_k is 1 in .* and 2 in"),
        ({"capacity_factor": 2.0}, r"capacity_factor is 1\.0 in .* and 2\.0 in"),
        ({"batch_priority": False}, "batch_priority is True in .* and False in"),
    ],
)
def test_other_routings_are_refused(change, words, tmp_path):
    """Models whose weights have the same shapes but whose tokens go other ways are not averaged."""
    shapes = [replace(SHAPE, moe=MoEConfig.of("tokens_choice", 2, **options)) for options in ({}, change)]
    folders = [save(tmp_path / str(seed), seed, shape) for seed, shape in enumerate(shapes)]
    with pytest.raises(ValueError, match=words):
        soup(folders, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_heads_on_other_blocks_are_refused(tmp_path):
    """The columns of such heads have the same shapes, but are of other features."""
    shapes = [replace(SHAPE, head_blocks=(block,)) for block in (0, 1)]
    folders = [save(tmp_path / str(seed), seed, shape) for seed, shape in enumerate(shapes)]
    with pytest.raises(ValueError, match=r"head_blocks is \(0,\) in .* and \(1,\) in"):
        soup(folders, tmp_path / "out")


def test_how_the_models_were_trained_may_differ(tmp_path):
    """Noise, dropout and the weights of losses are settings of training, which soups are made across."""
    others = {"noise_std": 0.5, "expert_dropout": 0.1, "load_weight": 0.5, "identical_init": True, "blocks": (1,)}
    shapes = [replace(SHAPE, moe=MoEConfig.of("tokens_choice", 2, **options)) for options in ({}, others)]
    folders = [save(tmp_path / str(seed), seed, shape) for seed, shape in enumerate(shapes)]
    assert soup(folders, tmp_path / "out").kept == (0, 1)


def test_other_dtypes_and_classes_are_refused(tmp_path):
    """float32 with float16; the same number of other classes; no model at all."""
    a = save(tmp_path / "a", 0, classes=("x", "y", "z"))
    half = save(tmp_path / "half", 1, dtype=torch.float16)
    other = save(tmp_path / "other", 1, classes=("x", "w", "z"))
    with pytest.raises(ValueError, match=r"is float32 \[.*\] in one and float16"):
        soup([a, half], tmp_path / "out")
    with pytest.raises(ValueError, match="different classes: 'y' and 'w'"):
        soup([a, other], tmp_path / "out")
    with pytest.raises(ValueError, match="at least one model"):
        soup([], tmp_path / "out")


def test_damaged_files_are_refused(tmp_path):
    """A flipped byte in any of the models."""
    folders = [save(tmp_path / str(seed), seed) for seed in range(2)]
    path = folders[1] / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[random.Random(0).randrange(len(data) // 2, len(data))] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="SHA-256"):
        soup(folders, tmp_path / "out")


@pytest.mark.parametrize("command", [Soup, Upcycle])
def test_what_is_there_is_refused(command, tmp_path):
    """A file and a folder with something in it are refused for the new model, from Python as on the command line."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for out, words in ((tmp_path / "full" / "file", "or remove it"), (tmp_path / "full", "a new or an empty folder")):
        with pytest.raises(ValueError, match=f"is there already: choose another --out, {words}"):
            command("model", out=str(out)).run()
