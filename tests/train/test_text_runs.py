"""Runs with a text tower: resumed, locked, with features kept, souped and looked into."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from softmoe.cli import main
from softmoe.convert import from_pretrained
from softmoe.data import open_source, some_captions, train_tokenizer
from softmoe.evaluate import extract, load_towers
from softmoe.report import load_run, summary_table
from softmoe.storage.checkpoint import read_checkpoint
from softmoe.train import TextSection, TrainConfig, train
from softmoe.train.folder import write_model
from softmoe.train.log import read_metrics
from softmoe.transfer.soups import greedy_soup, soup

TEXT = TextSection(size="ti", width=16, depth=2, heads=2, mlp_dim=16, vocab_size=400, mask_padding=True)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SOFTMOE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def text_config(make_config):
    def make(**changes) -> TrainConfig:
        return replace(make_config(**{"data.train": "shapes?size=16&length=12"} | changes), text=TEXT)

    return make


def final(folder, step: int = 6) -> dict[str, torch.Tensor]:
    return read_checkpoint(folder.checkpoints / f"step_{step:08d}").tensors["model"]


def test_a_stopped_run_continues_to_the_same_bits(text_config, tmp_path):
    """Four steps, then two: the weights, the drawn captions and the tokenizer are those of six steps."""
    whole = train(text_config()).folder
    config = replace(text_config(), run_name="stopped")
    train(replace(config, steps=4))
    tokenizer = (tmp_path / "runs" / "stopped" / "tokenizer.json").read_bytes()
    again = train(config).folder
    assert (again.path / "tokenizer.json").read_bytes() == tokenizer == (whole.path / "tokenizer.json").read_bytes()
    for name, value in final(whole).items():
        assert torch.equal(final(again)[name], value), name
    one, other = ([row["loss"] for row in read_metrics(folder.metrics) if "loss" in row] for folder in (whole, again))
    assert one == other


def test_reports_and_costs_count_both_towers(text_config, capsys):
    """With the vocabulary that the captions gave, not the one asked for; what is counted are pairs, not classes."""
    folder = train(replace(text_config(steps=2), text=replace(TEXT, vocab_size=4000))).folder
    header, line = summary_table([load_run(folder.path)])
    shown = dict(zip(header, line, strict=True))
    weights = final(folder, 2)
    assert len(weights["text.embed.weight"]) < 4000
    assert shown["parameters"] == f"{sum(value.numel() for value in weights.values()):,}"
    assert main(["cost", str(folder.path)]) == 0
    assert "Of two towers, both are counted" in capsys.readouterr().out
    assert main(["cost", str(folder.path), "--json"]) == 0
    (price,) = json.loads(capsys.readouterr().out).values()
    assert shown["parameters"] == f"{price['params']:,}"
    assert shown["MFLOP/image"] == f"{price['forward_flops'] / 1e6:.1f}"
    assert shown["best pairs matched %"] != "-"
    assert "last top-1 %" not in shown


def test_another_tokenizer_is_another_run(text_config, tmp_path):
    """A changed file in the run's folder is noticed."""
    config = text_config(steps=2)
    folder = train(config).folder
    values = json.loads((folder.path / "tokenizer.json").read_text())
    values["decoder"] = None
    (folder.path / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"tokenizer: .* -> "):
        train(replace(config, steps=3))


@pytest.mark.parametrize("kind", [".json", ".model"])
def test_a_given_tokenizer_is_copied(kind, text_config, tmp_path):
    """And serves evaluation after training, from the run and from the saved model."""
    made = train_tokenizer(some_captions(open_source("shapes", "train"), 200), 400, kind)
    file = tmp_path / f"mine{kind}"
    file.write_bytes(made.data)
    folder = train(replace(text_config(steps=2), text=replace(TEXT, tokenizer=str(file)))).folder
    file.unlink()
    of_run = load_towers(folder.path)
    saved = write_model(folder)
    assert saved.tokenizer is not None
    assert (saved.tokenizer.name, saved.tokenizer.data) == (f"tokenizer{kind}", made.data)
    assert torch.equal(load_towers(saved.folder).embed_texts(["a star"]), of_run.embed_texts(["a star"]))


def locked_start(make_config) -> Path:
    """A trained classifier."""
    return write_model(train(make_config(run_name="classifier", steps=2)).folder).folder


def test_locked_images(text_config, make_config, tmp_path):
    """The image tower ends as it began; features kept or computed at every step, the run is the same."""
    start = locked_start(make_config)
    runs = {}
    for name, how in (("kept", extract), ("computed", None)):
        config = text_config(run_name=name, **{"model.weights": str(start), "model.locked": True})
        runs[name] = train(config, extract=how).folder
    tower = from_pretrained(start).state_dict()
    for folder in runs.values():
        for name, value in final(folder).items():
            if name.startswith("image."):
                assert torch.equal(value, tower[name.removeprefix("image.")]), name
    for name, value in final(runs["computed"]).items():
        torch.testing.assert_close(final(runs["kept"])[name], value, rtol=1e-4, atol=1e-6, msg=name)
    kept, computed = (read_metrics(folder.metrics) for folder in runs.values())
    for one, other in zip(kept, computed, strict=True):
        assert one.get("loss", 0) == pytest.approx(other.get("loss", 0), rel=1e-5)
    assert kept[-1]["val/loss"] == pytest.approx(computed[-1]["val/loss"], rel=1e-5)
    assert kept[-1]["flops"] < computed[-1]["flops"]
    assert not any("optimizer" in name for name in final(runs["kept"]))
    moments = read_checkpoint(runs["kept"].checkpoints / "last").tensors["optimizer"]
    assert not any(name.startswith("image.") for name in moments)


def test_augmented_images_are_computed_at_every_step(text_config, make_config):
    """What differs each time cannot be kept."""
    calls = []
    changes = {"model.weights": str(locked_start(make_config)), "model.locked": True, "data.transform.flip": True}
    train(text_config(steps=2, **changes), extract=lambda *_: calls.append(1))
    assert not calls


def test_sparse_towers_learn_their_balance(text_config):
    """The balance loss of a sparse image tower is part of the loss: without its weight the loss is less by it."""
    rows = []
    for weight in (0.0, 1.0):
        changes = {"model.router": "tokens_choice", "log.every": 1, "objective.auxiliary_weight": weight}
        rows.append(read_metrics(train(text_config(steps=1, run_name=f"run{weight:.0f}", **changes)).folder.metrics)[0])
    assert rows[0]["auxiliary_loss"] == 0 < rows[1]["auxiliary_loss"]
    assert rows[1]["loss"] == pytest.approx(rows[0]["loss"] + rows[1]["auxiliary_loss"])


def test_soups_of_two_towers(text_config, tmp_path):
    """The mean of all weights of both towers, with the tokenizer; greedy soups need classification."""
    folders = []
    for seed in range(2):
        folders.append(train(replace(text_config(steps=2, run_name=f"r{seed}"), seed=seed)).folder.path)
    saved = soup(folders, tmp_path / "soup").saved
    assert saved.towers is not None
    found, parts = (
        load_towers(tmp_path / "soup").model.state_dict(),
        [load_towers(f).model.state_dict() for f in folders],
    )
    for name, value in found.items():
        mean = torch.stack([part[name].double() for part in parts]).mean(0)
        torch.testing.assert_close(value.double(), mean, rtol=1e-6, atol=1e-7, msg=name)
    with pytest.raises(ValueError, match="leave out --greedy"):
        greedy_soup(folders, tmp_path / "greedy", lambda model: 0.0)


def test_towers_with_other_words_are_not_souped(text_config, tmp_path):
    """The same shape but another tokenizer."""
    a = train(text_config(steps=2, run_name="a")).folder.path
    b = train(text_config(steps=2, run_name="b", **{"data.train": "shapes?size=16&length=12&seed=5"})).folder.path
    with pytest.raises(ValueError, match=r"text vocab_size is|tokenizer is"):
        soup([a, b], tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data.transform.mixup": 0.2}, "data.transform.mixup is for classification"),
        ({"objective.label_smoothing": 0.1}, "objective.label_smoothing is for classification"),
        ({"optim.layer_decay": 0.5}, "optim.layer_decay is for classification"),
        ({"data.batch_size": 1}, "data.batch_size must be 2 or more"),
        ({"data.train": "digits"}, "has no captions|scikit-learn"),
    ],
)
def test_settings_that_make_no_sense(text_config, changes, words):
    """Each has its sentence."""
    with pytest.raises(ValueError, match=words):
        train(text_config(**changes))


def test_locked_needs_a_text_tower(make_config):
    """Else nothing would be trained but the head."""
    with pytest.raises(ValueError, match=r"set text.size, or use lit"):
        make_config(**{"model.locked": True}).check()
