"""One rank of a training run, with something that goes wrong on rank 1 if the test says so."""

import contextlib
import io
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from softmoe import machine
from softmoe.accelerate import guards
from softmoe.data import TransformConfig
from softmoe.storage import shards
from softmoe.train import TrainConfig, train
from softmoe.train.config import (
    CheckpointSection,
    DataSection,
    EvaluationSection,
    LogSection,
    ModelSection,
    ParallelSection,
    ScheduleSection,
)
from softmoe.train.objectives import make_objective


def make_config(runs: Path, name: str = "run", *, steps: int = 4, **parallel: Any) -> TrainConfig:
    """Everything the loop can do, in a fraction of a second: average, accumulation, uneven evaluation."""
    return TrainConfig(
        runs=str(runs),
        run_name=name,
        steps=steps,
        model=ModelSection(name="soft_ti4_4e", width=16, depth=2, heads=2, mlp_dim=16, options={"slots_per_expert": 2}),
        data=DataSection(
            train="shapes?size=16",
            batch_size=8,
            eval_batch_size=4,
            workers=0,
            transform=TransformConfig(image_size=16, crop="resize", flip=False),
        ),
        schedule=ScheduleSection(kind="constant", peak=1e-2, warmup=0),
        evaluation=EvaluationSection(every=2, examples=9),  # three batches; on two ranks one has nothing in the last
        checkpoint=CheckpointSection(every=2),
        log=LogSection(every=1, quiet=True),
        ema=0.5,
        accumulate=2,
        parallel=ParallelSection(**parallel),
    )


def train_rank(rank: int, world: int, config: TrainConfig, trouble: str | None = None) -> dict[str, Any]:
    objective, passes = make_objective(config.objective), 0
    write = shards.write_parts

    def troubled(model: Any, batch: Any) -> Any:
        nonlocal passes
        passes += 1
        if rank == 1 and passes == 2 * 3:  # in the third step, after the first checkpoint
            if trouble == "kill":
                while not (Path(config.runs) / config.run_name / "checkpoints" / "last").exists():
                    time.sleep(0.05)
                os.kill(os.getpid(), signal.SIGKILL)
            if trouble == "hang":
                time.sleep(1000)
        if rank == 0 and passes == 2 * 3 and trouble == "stop":
            os.kill(os.getpid(), signal.SIGTERM)
        return objective(model, batch)

    def write_and_die(place: Path, *arguments: Any) -> None:
        if rank == 1 and "step_00000004" in str(place):
            os.kill(os.getpid(), signal.SIGKILL)
        write(place, *arguments)

    if config.precision == "bfloat16":
        machine.bfloat16_works = lambda: True  # the test has asked; this process may have no child to ask with
    if trouble == "read late":
        guards.ASYNC_DEVICES = ("cpu",)
    if trouble == "quick compiler":
        real = torch.compile
        torch.compile = lambda function, backend: real(function, backend="aot_eager")
    if trouble == "kill while saving":
        shards.write_parts = write_and_die
    result = train(config, objective=troubled)
    return {"step": result.step, "numbers": result.numbers, "signal": result.signal}


def command_rank(rank: int, world: int, argv: list[str]) -> tuple[int, str]:
    """Run one rank of a command, and return its exit code and what it printed."""
    from softmoe.cli import main

    with contextlib.redirect_stdout(io.StringIO()) as said:
        return main(argv), said.getvalue()
