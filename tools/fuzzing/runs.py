"""Damaged checkpoints and folders of runs."""

import contextlib
import io
import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fuzzing.cases import Case, Files, Set, Wrong, built, tree
from fuzzing.models import damaged, restated


def train_run(folder: Path) -> None:
    from softmoe import recipes
    from softmoe.train import train

    config = recipes.load("quickstart", "tiny")
    config = replace(
        config,
        run_name="run",
        runs=str(folder),
        steps=4,
        ema=0.9,
        evaluation=replace(config.evaluation, every=2, examples=8),
        checkpoint=replace(config.checkpoint, every=2, keep_last=1, keep_best=False, asynchronous=False),
        log=replace(config.log, every=1, quiet=True),
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        train(config)


@dataclass
class RunSeeds:
    checkpoint: Files
    run: Files
    model: Any
    optimizer: Any


def run_seeds(work: Path) -> RunSeeds:
    from softmoe.storage import load_saved, open_saved
    from softmoe.train import TrainConfig
    from softmoe.train.optim import make_optimizer

    run = built(work, "runs", train_run) / "run"
    folder = next(path for path in sorted(run.glob("checkpoints/step_*")))
    model = load_saved(open_saved(folder)).train()
    config = TrainConfig.from_dict(json.loads((run / "config.json").read_text())["train"])
    plain = {name: data for name, data in tree(run).items() if not name.startswith("checkpoints")}
    return RunSeeds(tree(folder), plain, model, make_optimizer(model, config.optim))


def checkpoint_make(rng: random.Random, seeds: RunSeeds) -> Case:
    files = damaged(rng, seeds.checkpoint)
    if rng.random() < 0.5:
        files = restated(files, "manifest.json", lambda values: values["files"])
    return Case(files)


def checkpoint_run(case: Case, folder: Path, seeds: RunSeeds) -> str:
    """Read, restore into a model and an optimizer, and make a step: wrong sizes in compiled code would show here."""
    import copy

    import torch

    from softmoe.storage import open_saved, read_checkpoint
    from softmoe.storage.checkpoint import restore
    from softmoe.train.run import TrainState

    place = case.write(folder / "run" / "checkpoints" / "step_00000004")
    found = read_checkpoint(place)
    open_saved(place)
    TrainState.read(found.texts.get("state", {}).get("progress"))
    model, optimizer = copy.deepcopy((seeds.model, seeds.optimizer))
    restore(found, model, optimizer, copy.deepcopy(model))
    if case.files["manifest.json"] == seeds.checkpoint["manifest.json"]:
        wrong = [name for name, data in case.files.items() if data != seeds.checkpoint.get(name)]
        if wrong:
            raise Wrong(f"{wrong[0]} is another than was saved")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return "right"


def run_make(rng: random.Random, seeds: RunSeeds) -> Case:
    return Case(damaged(rng, seeds.run))


def run_run(case: Case, folder: Path, seeds: RunSeeds) -> str:
    from softmoe.report import load_run, summary_table
    from softmoe.train.folder import RunFolder

    case.write(folder)
    record = load_run(folder)
    RunFolder(folder).stored()
    summary_table([record])
    return "right"


CHECKPOINTS = Set(run_seeds, checkpoint_make, checkpoint_run)
RUNS = Set(run_seeds, run_make, run_run)
