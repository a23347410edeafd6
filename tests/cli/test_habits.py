"""What people type out of habit."""

import pytest

from softmoe import recipes
from softmoe.cli.habits import OTHER_NAMES, OTHER_WAYS, translate
from softmoe.cli.parse import parse_run
from softmoe.models.moe_config import router_options
from softmoe.storage.settings import flatten
from softmoe.train import TrainConfig

KEYS = [*flatten(TrainConfig().to_dict()), *(f"model.{name}" for name in router_options()), "epochs"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["--lr", "1e-3"], ["--schedule.peak", "1e-3"]),
        (["--data-path", "photos"], ["--data.train", "photos"]),
        (["--data-dir=photos"], ["--data.train=photos"]),
        (["--wandb", "mine"], ["--log.wandb", "mine"]),
        (["--batch-size=8"], ["--data.batch-size=8"]),
        (["--batch_size", "8"], ["--data.batch-size", "8"]),
        (["--warmup", "5", "--mixup", "0.2"], ["--schedule.warmup", "5", "--data.transform.mixup", "0.2"]),
        (["--compile"], ["--compile", "True"]),
        (["--compile", "--steps", "3"], ["--compile", "True", "--steps", "3"]),
        (["--compile", "False"], ["--compile", "False"]),
        (["--epochs", "3"], ["--epochs", "3"]),
        (["--modle.width", "3", "--help", "-h"], ["--modle.width", "3", "--help", "-h"]),
    ],
)
def test_translations(typed: list[str], meant: list[str]):
    """Short and foreign names become whole keys; switches need no value; the rest is left to the parser."""
    assert translate(typed, KEYS, {"compile"})[0] == meant


@pytest.mark.parametrize(("rank", "said"), [("0", "softmoe: a run of 60 steps, the recipe has"), ("1", "")])
def test_one_process_of_many_says_what_was_made_to_fit(rank: str, said: str, monkeypatch, capsys, tmp_path):
    """A run of few steps says what follows from that, once for all its processes."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.chdir(tmp_path)
    parse_run(recipes.load("quickstart"), ["--steps", "60"], "softmoe train quickstart")
    heard = capsys.readouterr().err
    assert heard.startswith(said)
    assert bool(heard) == bool(said)


def test_keys_that_were_given():
    """Whole keys, however they were typed."""
    assert translate(["--lr", "1", "--steps=2"], KEYS, ())[1] == {"schedule.peak", "steps"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("resume", "softmoe train runs/NAME"),
        ("config", "softmoe train FILE.py"),
        ("weight-decay", "--optim.kernel-decay"),
        ("every", "may mean --checkpoint.every or --evaluation.every or --log.every: write the whole key"),
    ],
)
def test_sentences(name: str, words: str):
    """What is done in another way, or may mean two keys, gets a sentence."""
    with pytest.raises(ValueError, match=words):
        translate([f"--{name}", "1"], KEYS, ())


def test_tables_name_real_keys():
    """Every translation leads to a key that there is, and no key of ours is taken away."""
    assert set(OTHER_NAMES.values()) <= set(KEYS)
    assert not (set(OTHER_NAMES) | set(OTHER_WAYS)) & set(KEYS)
