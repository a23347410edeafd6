"""Cooldown branches: many training lengths from one long run, the paper's way.

A branch starts from a kept checkpoint of a run whose learning rate has not begun to cool down, and takes it to zero in
N steps, in a folder of its own. The first run is only read.
"""

import os
import shutil
from dataclasses import replace
from pathlib import Path

from softmoe.train.checkpoint import read_checkpoint
from softmoe.train.config import TrainConfig
from softmoe.train.files import sync_folder, write_json
from softmoe.train.folder import RunFolder
from softmoe.train.metrics import MetricsFile


def branch(checkpoint: Path | str, cooldown: int, run_name: str | None = None, runs: str | None = None) -> TrainConfig:
    """Prepare the folder of the branch and return its settings: `train` then continues it as any run.

    `checkpoint` is a folder runs/NAME/checkpoints/step_XXXXXXXX. Where the branch exists already nothing is changed.
    """
    checkpoint = Path(checkpoint)
    source = RunFolder(checkpoint.resolve().parent.parent)
    stored = source.stored()
    if stored is None:
        raise ValueError(f"{checkpoint} is not a checkpoint in the folder of a run")
    step = read_checkpoint(checkpoint).step
    config = branch_config(stored[0], step, cooldown, run_name, runs or str(source.path.parent))
    target = RunFolder.of(config)
    if target.path.exists():
        return config
    partial = target.path.with_name(f".partial-{target.path.name}-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    copy = RunFolder(partial)
    copy_checkpoint(checkpoint.resolve(), copy.checkpoints / checkpoint.resolve().name)
    if source.metrics.exists():
        shutil.copy(source.metrics, copy.metrics)
        MetricsFile(copy.metrics).rewind(step)
    facts = stored[1]
    write_json(copy.config, {"train": config.to_dict(), "facts": facts})
    os.rename(partial, target.path)
    sync_folder(target.path.parent)
    return config


def branch_config(old: TrainConfig, step: int, cooldown: int, run_name: str | None, runs: str) -> TrainConfig:
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
        run_name=run_name or f"{old.run_name}-{step}-{cooldown}",
        runs=runs,
        steps=step + cooldown,
        schedule=replace(old.schedule, cooldown=cooldown, decay_steps=old.schedule.decay_steps or old.steps),
    )


def copy_checkpoint(source: Path, target: Path) -> None:
    """Hard links where the file system has them: checkpoints are never changed in place."""
    target.mkdir(parents=True)
    for file in source.iterdir():
        try:
            os.link(file, target / file.name)
        except OSError:
            shutil.copy(file, target / file.name)
