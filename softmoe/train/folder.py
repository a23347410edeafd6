"""The folder of a run: runs/<name>/{config.json, metrics.jsonl, checkpoints/, eval.json}, one process at a time.

A run continues only with the settings it was begun with. Those that do not change the weights (FREE below) may change,
and also `steps` and `schedule`, if every learning rate already used stays the same.
"""

import itertools
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from softmoe.convert.foreign import open_foreign
from softmoe.data import open_source
from softmoe.models import VisionTransformer, ViTConfig
from softmoe.storage import (
    Preprocessing,
    SavedModel,
    load_saved,
    load_two_tower,
    open_saved,
    save_adapters,
    save_pretrained,
)
from softmoe.storage.architecture import parse_architecture, split_architecture
from softmoe.storage.checkpoint import STEP_NAME
from softmoe.storage.files import check_path, follow_link, read_json, write_json
from softmoe.storage.hub import check_run
from softmoe.storage.saved import TOKENIZER_FILES, tokenizer_of_run
from softmoe.storage.settings import flatten
from softmoe.train.config import TrainConfig
from softmoe.train.log import scan_metrics
from softmoe.train.model_section import model_options
from softmoe.train.optim import make_schedule

FREE = (
    "run_name",
    "runs",
    "log.",
    "checkpoint.",
    "evaluation.",
    "model.refit_head",
    "data.val",
    "data.val_split",
    "data.eval_batch_size",
    "data.workers",
    "data.prefetch",
    "data.buffer_mb",
    "data.max_broken",
    "max_bad_steps",
    "threads",
    "deterministic",
    "gradient_checkpointing",  # neither changes a bit
    "activation_gb",
    "precision",  # the precision that is used is a fact of the run, which may not change
    "parallel.",
)
FUTURE = ("steps", "schedule.")
FOLLOW = ("schedule.warmup", "schedule.cooldown")  # the steps, when a run is made to fit
LISTED, BRIEFLY = 8, 3  # differences shown


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

    def chosen_checkpoint(self) -> Path:
        """Return the checkpoint that becomes the run's model: the best, else the last."""
        for name in ("best", "last"):
            if (folder := follow_link(self.checkpoints / name)).is_dir():
                return folder.resolve()
        raise ValueError(f"{self.path} has no checkpoint yet")

    def chosen_numbers(self) -> tuple[int, dict[str, float]]:
        """Return the step of the checkpoint that becomes the run's model, and its evaluation, if it has one."""
        state = read_json(self.chosen_checkpoint() / "state.json")
        evaluated = state["progress"].get("evaluation") or {}
        return state["step"], evaluated["numbers"] if evaluated.get("step") == state["step"] else {}

    def stored(self) -> tuple[TrainConfig, dict[str, Any]] | None:
        """Return the settings the run was begun with, and the facts of its data and model; None for a new run."""
        if not self.config.exists():
            return None
        values = read_json(self.config)
        if not isinstance(values, dict) or not {"train", "facts"} <= values.keys():
            raise ValueError(f"{self.config} is not the config.json of a training run")
        return TrainConfig.from_dict(values["train"]), values["facts"]

    def check_place(self) -> None:
        """Raise ValueError if a run cannot live here: a file is in the way, or a folder with other things in it."""
        above = next((p for p in (self.path, *self.path.parents) if p.exists()), self.path)
        if above.exists() and not above.is_dir():
            raise ValueError(f"{above} is a file: choose another --run-name or --runs")
        if above != self.path or self.config.exists():
            return
        ours = (self.metrics.name, self.checkpoints.name, *TOKENIZER_FILES)  # of a run that was killed as it began
        others = [p.name for p in self.path.iterdir() if p.name not in ours and not p.name.startswith(".")]
        if others:
            raise ValueError(f"{self.path} holds {min(others)} and no run: choose another --run-name")

    def begin(self, config: TrainConfig, facts: dict[str, Any]) -> None:
        write_json(self.config, {"train": config.to_dict(), "facts": facts})

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out of the folder. The lock ends with the process, however that ends."""
        self.check_place()
        check_path(self.path).mkdir(parents=True, exist_ok=True)
        try:
            import fcntl
        except ImportError:  # no such locks on this system
            yield
            return
        with (self.path / ".lock").open("a+", encoding="utf-8") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ValueError(
                    f"another process is training in {self.path}: stop it, or use another run_name"
                ) from error
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            try:
                yield
            finally:
                self.remove_if_unused()

    def remove_if_unused(self) -> None:
        """Remove the folder of a run that could not begin."""
        with suppress(OSError):
            if [path.name for path in self.path.iterdir()] == [".lock"]:
                (self.path / ".lock").unlink()
                self.path.rmdir()


def differences(old: TrainConfig, new: TrainConfig, done: int) -> list[str]:
    """List as `key: old -> new` the changes that are not allowed after `done` steps; empty if the run may continue."""
    before, after = flatten(old.to_dict()), flatten(new.to_dict())
    keys = [key for key in before | after if before.get(key) != after.get(key)]
    if after.get("model.new_head") is None:  # nothing is asked for, and the run has begun
        keys = [key for key in keys if key != "model.new_head"]
    if same_experts(old, new):  # options that are said, and others that are not since they are the default
        keys = [key for key in keys if key.removeprefix("model.") not in model_options()]
    changed = [key for key in keys if not any(matches(key, rule) for rule in FREE)]
    future = [key for key in changed if any(matches(key, rule) for rule in FUTURE)]
    if future and same_past(old, new, done):
        changed = [key for key in changed if key not in future]
    return [f"{key}: {before.get(key)} -> {after.get(key)}" for key in changed]


def same_experts(old: TrainConfig, new: TrainConfig) -> bool:
    """Tell if the models of two runs have the same routers and experts."""
    one, other = (config.model.resolve(None, config.data.transform.image_size).moe for config in (old, new))
    return one == other


def free_name(config: TrainConfig, recipe: TrainConfig, *, named: bool) -> tuple[TrainConfig, str]:
    """Return the settings with a run_name whose folder is free or holds this very run, and a sentence if it is new.

    A second run of a recipe gets a number: finetune_2. If the user chose the name (`named`) and another run has it, a
    ValueError lists the settings that the user changed; `recipe` are the settings without these changes.
    """
    first: list[str] = []
    for number in itertools.count(1):
        name = config.run_name if number == 1 else f"{config.run_name}_{number}"
        changed = other_run(replace(config, run_name=name))
        if not changed:
            break
        first = first or without_consequences(changed)
        if named:
            break
    else:
        raise AssertionError("there is always another number")
    if not first:
        return config, ""
    base, mine = flatten(recipe.to_dict()), flatten(config.to_dict())
    chosen = [line for line in first if base.get(key := line.split(": ")[0]) != mine.get(key)] or first
    if named:
        shown = chosen[:LISTED]
        more = f"\n  and {len(first) - len(shown)} more" if len(first) > len(shown) else ""
        holds = f"{RunFolder.of(config).path} holds a run of another configuration:\n  " + "\n  ".join(shown) + more
        raise ValueError(f"{holds}\n{way_out(config, first, 'another --run-name')}")
    made, shown = replace(config, run_name=name), chosen[:BRIEFLY]
    more = f" and {len(first) - len(shown)} more" if len(first) > len(shown) else ""
    holds = f"{RunFolder.of(config).path} holds another run ({', '.join(shown)}{more})"
    return made, f"{holds}, so this one is {RunFolder.of(made).path}; --run-name chooses a name"


def way_out(config: TrainConfig, changed: list[str], name: str) -> str:
    """Say what to do about a run that differs so from these settings; `name` is how another name is asked for."""
    folder = RunFolder.of(config)
    stored = folder.stored()
    longer = stored is not None and config.steps > stored[0].steps and config.text.size is None
    if longer and all(any(matches(line.split(": ")[0], rule) for rule in FUTURE) for line in changed):
        train_on = f"softmoe finetune {shlex.quote(str(folder.path))} {shlex.quote(config.data.train)} --steps N"
        return (
            f"the schedule would have given the steps that are done other learning rates, so they cannot be a part of "
            f"{config.steps}: {train_on} trains the model of this run further, in a run of its own; {name} starts again"
        )
    return f"use {name}, or remove the folder to start again"


def without_consequences(changed: list[str]) -> list[str]:
    """Leave out of a list of differences those that only follow another number of steps."""
    if not any(line.startswith("steps: ") for line in changed):
        return changed
    return [line for line in changed if line.split(": ")[0] not in FOLLOW]


def other_run(config: TrainConfig) -> list[str]:
    """List how the run in the folder of these settings differs from them; empty if it may continue."""
    folder = RunFolder.of(config)
    stored = folder.stored()
    if stored is None:
        return []
    steps = [int(found[1]) for path in folder.checkpoints.glob("*") if (found := STEP_NAME.fullmatch(path.name))]
    return differences(stored[0], config, max(steps, default=0))


def matches(key: str, rule: str) -> bool:
    return key.startswith(rule) if rule.endswith(".") else key == rule


def same_past(old: TrainConfig, new: TrainConfig, done: int) -> bool:
    if new.steps < done:
        return False
    was, will = make_schedule(old.schedule, old.steps), make_schedule(new.schedule, new.steps)
    return all(was(step) == will(step) for step in range(done))


def write_model(run: RunFolder) -> SavedModel:
    """Write the best (else the last) checkpoint of a run as a saved model with class names in the run's folder."""
    stored = run.stored()
    if stored is None:
        raise ValueError(f"{run.path} is not the folder of a run")
    link, (_, numbers) = run.chosen_checkpoint(), run.chosen_numbers()
    config, results = stored[0], {"results": numbers} if numbers else {}
    classes = open_source(config.data.train, config.data.train_split).classes
    if (link / "model").is_dir():
        return join_parts(link, config, classes, run.path / "model", results)
    checkpoint = open_saved(link)
    named = classes if len(classes) == checkpoint.config.num_classes else None
    made = checkpoint.provenance | results | ({"weights": config.model.weights} if config.model.weights else {})
    model = load_saved(checkpoint) if checkpoint.towers is None else load_two_tower(checkpoint)
    if not all(tensor.isfinite().all() for tensor in model.state_dict().values()):
        raise ValueError(f"{link} has weights that are not finite numbers, and is not made into a model")
    facts = {"preprocessing": checkpoint.preprocessing, "classes": named, "provenance": made}
    if config.model.adapters and config.model.weights is not None:
        assert isinstance(model, VisionTransformer)
        base = saved_base(config.model.weights, run.path / "base")
        return save_adapters(model, run.path / "model", base, **facts)
    return save_pretrained(model, run.path / "model", tokenizer=checkpoint.tokenizer, **facts)


def saved_base(weights: str, folder: Path) -> str | Path:
    """Return the saved model that is the base of adapters: `weights`, or `folder` made of others' weights."""
    foreign = open_foreign(weights)
    if foreign is None:
        return weights
    facts = {"preprocessing": foreign.preprocessing, "classes": foreign.classes, "provenance": {"weights": weights}}
    save_pretrained(foreign.model, folder, **facts)
    return folder


def join_parts(
    checkpoint: Path, config: TrainConfig, classes: Sequence[str], folder: Path, results: dict[str, Any]
) -> SavedModel:
    """Write a checkpoint of many processes as a saved model, joining their parts one tensor at a time."""
    from softmoe.storage.shards import save_parts

    shape, towers = split_architecture(parse_architecture(read_json(checkpoint / "config.json")))
    made = {"run": config.run_name, "step": read_json(checkpoint / "manifest.json")["step"]}
    return save_parts(
        checkpoint / ("ema" if (checkpoint / "ema").is_dir() else "model"),  # the average was evaluated
        towers or shape,
        folder,
        tokenizer=towers and tokenizer_of_run(checkpoint.parent.parent, config.text.lower),
        preprocessing=Preprocessing.of(config.data.transform),
        classes=classes if len(classes) == shape.num_classes else None,
        provenance=made | {"recipe_data": config.data.train, "loss": config.objective.loss} | results,
    )


@dataclass(frozen=True)
class RunRecord:
    """The settings and metrics of a run, read from its folder. `rows` are the lines of metrics.jsonl, in order."""

    name: str
    folder: Path
    config: TrainConfig
    classes: int
    rows: tuple[dict[str, Any], ...]
    damaged: int = 0
    """Lines of metrics.jsonl that cannot be read."""

    @property
    def model(self) -> ViTConfig:
        return self.config.model.resolve(self.classes or None, self.config.data.transform.image_size)

    def curve(self, x: str, y: str) -> tuple[list[float], list[float]]:
        """Return two columns of the rows that have both."""
        pairs = [(row[x], row[y]) for row in self.rows if row.get(x) is not None and row.get(y) is not None]
        return [a for a, _ in pairs], [b for _, b in pairs]

    def last(self, key: str) -> Any:
        """Return the newest value, or None."""
        return next((row[key] for row in reversed(self.rows) if row.get(key) is not None), None)

    def routers(self, key: str) -> dict[str, tuple[list[int], list[float]]]:
        """Return for each MoE layer the steps and values of one figure of its health (scale, max_dispatch, ...)."""
        curves: dict[str, tuple[list[int], list[float]]] = {}
        for row in self.rows:
            for layer, health in row.get("routers", {}).items():
                if health.get(key) is not None:
                    steps, values = curves.setdefault(layer, ([], []))
                    steps.append(row["step"])
                    values.append(health[key])
        return curves


def load_run(folder: Path | str) -> RunRecord:
    """Read what a run left behind; ValueError for a folder that is not a run's."""
    folder = Path(folder)
    check_run(folder)
    settings, metrics = folder / "config.json", folder / "metrics.jsonl"
    stored = read_json(settings)
    rows, damaged = scan_metrics(metrics)
    try:
        config, classes = TrainConfig.from_dict(stored["train"]), int(stored["facts"]["classes"])
    except (AttributeError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{settings} is not the config.json of a training run") from error
    return RunRecord(folder.resolve().name, folder, config, classes, tuple(rows), damaged)
