"""The folder of a run: runs/<name>/{config.json, metrics.jsonl, checkpoints/, eval.json}, one process at a time.

A run continues only under the settings it was begun with. Free to change are those that do not touch the weights
(FREE below), and the length and shape of the learning rate's future: `steps` and `schedule` may change if every
rate already used stays what it was.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from softmoe.storage.files import read_json, write_json
from softmoe.storage.strict import flatten
from softmoe.train.config import TrainConfig
from softmoe.train.schedule import make_schedule

FREE = (
    "run_name",
    "runs",
    "log.",
    "checkpoint.",
    "evaluation.",
    "data.val",
    "data.val_split",
    "data.eval_batch_size",
    "data.workers",
    "data.prefetch",
    "data.max_broken",
    "max_bad_steps",
    "threads",
    "parallel.",
)
FUTURE = ("steps", "schedule.")


class RunFolder:
    def __init__(self, path: Path):
        self.path = path
        self.config = path / "config.json"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.evaluation = path / "eval.json"

    @classmethod
    def of(cls, config: TrainConfig) -> "RunFolder":
        return cls(Path(config.runs) / config.run_name)

    def stored(self) -> tuple[TrainConfig, dict[str, Any]] | None:
        """The settings the run was begun with, and what was noted of its data and model; None for a new run."""
        if not self.config.exists():
            return None
        values = read_json(self.config)
        if not isinstance(values, dict) or not {"train", "facts"} <= values.keys():
            raise ValueError(f"{self.config} is not the config.json of a training run")
        return TrainConfig.from_dict(values["train"]), values["facts"]

    def begin(self, config: TrainConfig, facts: dict[str, Any]) -> None:
        write_json(self.config, {"train": config.to_dict(), "facts": facts})

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Refuse a second process in the same folder. The lock goes with the process, however it ends."""
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            import fcntl
        except ImportError:  # no such locks on this system
            yield
            return
        with (self.path / ".lock").open("a+") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ValueError(
                    f"another process is training in {self.path}: stop it, or use another run_name"
                ) from error
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield


def differences(old: TrainConfig, new: TrainConfig, done: int) -> list[str]:
    """Lines `key: old -> new` for what may not change once `done` steps are made; empty if the run may continue."""
    before, after = flatten(old.to_dict()), flatten(new.to_dict())
    keys = [key for key in before | after if before.get(key) != after.get(key)]
    changed = [key for key in keys if not any(matches(key, rule) for rule in FREE)]
    future = [key for key in changed if any(matches(key, rule) for rule in FUTURE)]
    if future and same_past(old, new, done):
        changed = [key for key in changed if key not in future]
    return [f"{key}: {before.get(key)} -> {after.get(key)}" for key in changed]


def matches(key: str, rule: str) -> bool:
    return key.startswith(rule) if rule.endswith(".") else key == rule


def same_past(old: TrainConfig, new: TrainConfig, done: int) -> bool:
    if new.steps < done:
        return False
    was, will = make_schedule(old.schedule, old.steps), make_schedule(new.schedule, new.steps)
    return all(was(step) == will(step) for step in range(done))
