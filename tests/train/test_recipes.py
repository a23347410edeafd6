import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from softmoe import recipes
from softmoe.train import TrainConfig, train
from softmoe.train.log import read_metrics


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_trains_two_steps(name: str, tmp_path: Path):
    """The tiny mode runs, evaluates and saves; the settings are valid and named after the recipe."""
    recipes.load(name).check()
    config = recipes.load(name, "tiny")
    assert config.run_name == name
    result = train(replace(config, runs=str(tmp_path), log=replace(config.log, quiet=True)))
    assert result.step == 2
    assert len(read_metrics(result.folder.metrics)) == 3
    assert (result.folder.checkpoints / "last" / "model.safetensors").exists()


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_has_a_docstring(name: str):
    """With its command, its time, and the number that was measured with its machine or date, or that it was not run."""
    text = recipes.find(name).__doc__ or ""
    assert f"softmoe train {name}" in text
    assert re.search(r"^Time: \S", text, re.MULTILINE)
    measured = re.search(r"^Measured: (.*)", text, re.MULTILINE | re.DOTALL)
    assert measured
    assert "not run" in measured.group(1) or re.search(r"\d %.*(seed|EPYC)", measured.group(1), re.DOTALL)


def test_a_users_own_file(tmp_path: Path):
    """A .py file with recipe() works as ours do; its run is named after the file."""
    path = tmp_path / "mine.py"
    path.write_text("from softmoe.train import TrainConfig\ndef recipe():\n    return TrainConfig(steps=7)\n")
    assert recipes.load(str(path)) == TrainConfig(steps=7, run_name="mine")


def test_lists_in_a_recipe_are_tuples(tmp_path: Path):
    """A list where a tuple is declared is the same setting, so that a second call goes on with the run."""
    path = tmp_path / "mine.py"
    path.write_text(
        "from softmoe.train import ModelSection, TrainConfig\n"
        "def recipe():\n    return TrainConfig(model=ModelSection(blocks=[1], image_size=[32, 48]))\n"
    )
    config = recipes.load(str(path))
    assert (config.model.blocks, config.model.image_size) == ((1,), (32, 48))
    assert config == TrainConfig.from_dict(json.loads(json.dumps(config.to_dict())))


@pytest.mark.parametrize(
    ("text", "message"),
    [("x = 1", r"has no function recipe\(\)"), ("def recipe():\n    return 3", "must return a TrainConfig, got int")],
)
def test_wrong_files(tmp_path: Path, text: str, message: str):
    """Said in one sentence."""
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        recipes.load(str(path))


def test_unknown_recipes_offer_the_nearest(tmp_path: Path):
    """Names and files."""
    with pytest.raises(ValueError, match="no recipe 'quickstrat', did you mean 'quickstart'"):
        recipes.load("quickstrat")
    with pytest.raises(ValueError, match="no recipe file"):
        recipes.load(str(tmp_path / "nothing.py"))
