"""Cooldown branches: many training lengths from one long run, the paper's way.

A branch starts from a kept checkpoint of a run whose learning rate has not begun to cool down, and takes it to zero in
N steps, in a folder of its own. The first run is only read.
"""

import os
import shutil
from dataclasses import replace
from pathlib import Path

from softmoe.storage.checkpoint import read_checkpoint
from softmoe.storage.files import whole_folder
from softmoe.train.config import TrainConfig
from softmoe.train.folder import RunFolder
from softmoe.train.log import MetricsFile


def branch(checkpoint: Path | str, cooldown: int, run_name: str | None = None, runs: str | None = None) -> TrainConfig:
    """Prepare the folder of the branch and return its settings: `train` then continues it as any run.

    `checkpoint` is a folder runs/NAME/checkpoints/step_XXXXXXXX. Where the branch exists already nothing is changed.
    """
    config = plan_branch(checkpoint, cooldown, run_name, runs)
    checkpoint = Path(checkpoint).resolve()
    source, target = run_of(checkpoint), RunFolder.of(config)
    if target.path.exists():
        return config
    with whole_folder(target.path) as folder:
        partial = RunFolder(folder)
        copy_checkpoint(checkpoint, partial.checkpoints / checkpoint.name)
        if source.metrics.exists():
            shutil.copy(source.metrics, partial.metrics)
            MetricsFile(partial.metrics).rewind(config.steps - cooldown)
        stored = source.stored()
        assert stored is not None
        partial.begin(config, facts=stored[1])
    return config


def plan_branch(
    checkpoint: Path | str, cooldown: int, run_name: str | None = None, runs: str | None = None
) -> TrainConfig:
    """The settings of a branch, without making it."""
    checkpoint = Path(checkpoint).resolve()
    source = run_of(checkpoint)
    stored = source.stored()
    if stored is None:
        raise ValueError(f"{checkpoint} is not a checkpoint in the folder of a run")
    step = read_checkpoint(checkpoint).step
    name = run_name or f"{source.path.name}-{step}-{cooldown}"
    return branch_config(stored[0], step, cooldown, name, runs or str(source.path.parent))


def run_of(checkpoint: Path) -> RunFolder:
    return RunFolder(checkpoint.parent.parent)


def branch_config(old: TrainConfig, step: int, cooldown: int, run_name: str, runs: str) -> TrainConfig:
    """The same rates up to `step`, then a straight line to zero."""
    if cooldown < 1:
        raise ValueError(f"a branch needs a cooldown of at least 1 step, got {cooldown}")
    if step < old.schedule.warmup:
        raise ValueError(f"step {step} is still in the warm-up of {old.schedule.warmup} steps: branch from a later one")
    if old.schedule.cooldown and step > old.steps - old.schedule.cooldown:
        raise ValueError(
            f"step {step} is already in the cooldown, which began at {old.steps - old.schedule.cooldown}: "
            "branch from an earlier one"
        )
    return replace(
        old,
        run_name=run_name,
        runs=runs,
        steps=step + cooldown,
        schedule=replace(old.schedule, cooldown=cooldown, decay_steps=old.schedule.decay_steps or old.steps),
    )


def copy_checkpoint(source: Path, target: Path) -> None:
    """Hard links where the file system has them: checkpoints are never changed in place."""
    shutil.copytree(source, target, copy_function=link_or_copy)


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy(source, target)
