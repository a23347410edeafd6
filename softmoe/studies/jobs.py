"""Define the jobs of studies. A job is known by a hash of its settings, so that studies share equal jobs.

    Training      a run of the loop
    Branch        the cooldown of another run from one of its checkpoints
    Finetuning    another run's model on other data, at another size
    Timing        the speed of a training step

A job works in a folder of its own, OUT/runs/<key>, and returns named numbers.
"""

import hashlib
import json
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from softmoe.budget import Cost, cost, training_flops
from softmoe.data import open_source
from softmoe.models import TwoTowerConfig, ViTConfig
from softmoe.storage.settings import flatten
from softmoe.train import ModelSection, TrainConfig, train
from softmoe.train.folder import FREE, RunFolder, matches
from softmoe.train.log import read_metrics
from softmoe.transfer import branch

COUNTS = ("data.val", "data.val_split", "evaluation.examples", "checkpoint.keep_every")
"""Settings that a run may change when it goes on, but that make another result."""
ACCURACIES = ("top1", "top5", "image_to_text", "text_to_image")
HEALTH = ("drop_rate", "max_dispatch", "max_combine", "scale")
LAST = 5  # lines of metrics over which the end of training is averaged


class Stopped(Exception):
    """Raised if a signal ended the job early; it continues when it is run again."""


class Job(Protocol):
    @property
    def needs(self) -> "Job | None":
        """The job whose folder this one reads."""
        ...

    @property
    def has_features(self) -> bool:
        """True if it leaves a model whose features can tell other classes apart."""
        ...

    def identity(self) -> dict[str, Any]:
        """Return everything that decides the outcome, as plain values."""
        ...

    def flops(self) -> float: ...

    def run(self, folder: Path) -> dict[str, float]: ...


def key_of(job: Job) -> str:
    return hashlib.sha256(json.dumps(job.identity(), sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Training:
    config: TrainConfig

    @property
    def needs(self) -> Job | None:
        return None

    def identity(self) -> dict[str, Any]:
        return {"train": decisive_settings(self.config)}

    @property
    def has_features(self) -> bool:
        return self.config.text.size is None

    def flops(self) -> float:
        return training_flops(full_shape(self.config)) * float(self.config.steps * self.config.data.batch_size)

    def run(self, folder: Path) -> dict[str, float]:
        return trained(replace(self.config, runs=str(folder.parent), run_name=folder.name))


@dataclass(frozen=True)
class Branch:
    parent: Training
    step: int
    cooldown: int

    has_features = True

    @property
    def needs(self) -> Job:
        return self.parent

    def identity(self) -> dict[str, Any]:
        return {"branch": key_of(self.parent), "step": self.step, "cooldown": self.cooldown}

    def flops(self) -> float:
        return self.parent.flops() * self.cooldown / self.parent.config.steps

    def run(self, folder: Path) -> dict[str, float]:
        checkpoint = folder.parent / key_of(self.parent) / "checkpoints" / f"step_{self.step:08d}"
        return trained(branch(checkpoint, self.cooldown, folder.name, str(folder.parent)))


@dataclass(frozen=True)
class Finetuning:
    """Fine-tunes the parent's model; `config` is a recipe whose own model is not used."""

    parent: Training
    config: TrainConfig

    has_features = True

    @property
    def needs(self) -> Job:
        return self.parent

    @property
    def shaped(self) -> TrainConfig:
        return replace(self.config, model=replace(self.parent.config.model, new_head=True))

    def identity(self) -> dict[str, Any]:
        return {"finetune": key_of(self.parent), "train": decisive_settings(self.shaped)}

    def flops(self) -> float:
        return Training(self.shaped).flops()

    def run(self, folder: Path) -> dict[str, float]:
        model = replace(self.shaped.model, weights=str(folder.parent / key_of(self.parent)))
        return trained(replace(self.shaped, model=model, runs=str(folder.parent), run_name=folder.name))


@dataclass(frozen=True)
class Timing:
    """Times forward, backward and update on random images. One CPU thread has its own clock: others do not count."""

    model: ModelSection
    image_size: int
    batch: int
    repeat: int = 0
    """Measure again."""
    seconds: float = 1.0
    has_features = False

    @property
    def needs(self) -> Job | None:
        return None

    @property
    def shape(self) -> ViTConfig:
        return self.model.resolve(100, self.image_size)

    def identity(self) -> dict[str, Any]:
        return {"time": self.shape.to_dict(), "batch": self.batch, "repeat": self.repeat}

    def flops(self) -> float:
        return 0.0

    def run(self, folder: Path) -> dict[str, float]:
        import torch

        from softmoe.bench.cases import Contender, train_step
        from softmoe.models import VisionTransformer

        torch.manual_seed(0)
        images = torch.randn(self.batch, 3, self.image_size, self.image_size)
        step = train_step(Contender(VisionTransformer(self.shape), images, None))
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        step()
        taken: list[float] = []
        while sum(taken) < self.seconds or len(taken) < 3:
            start = clock()
            step()
            taken.append(clock() - start)
        known = cost(self.shape)
        seconds = sorted(taken)[len(taken) // 2]
        return {"images_per_second": self.batch / seconds, "step_ms": 1e3 * seconds, **priced(known)}


def trained(config: TrainConfig) -> dict[str, float]:
    """Train to the end, or go on where an earlier call stopped, and read the numbers from the run's folder."""
    fresh, start = RunFolder.of(config).stored() is None, time.process_time()
    result = train(config)
    if result.signal is not None:
        raise Stopped
    rows = read_metrics(result.folder.metrics)
    last = rows[-1]
    numbers = {
        **{name: 100.0 * last[f"val/{name}"] for name in ACCURACIES if f"val/{name}" in last},
        "val_loss": last["val/loss"],
        "train_loss": fmean([row["loss"] for row in rows if row.get("loss") is not None][-LAST:]),
        "steps": config.steps,
        "tflops": last["flops"] / 1e12,
        "seconds": last["device_seconds"],
        **priced(price(config)),
        **health(rows),
    }
    if fresh and config.threads == 1 and config.data.workers == 0:  # one thread did it all, in one go
        numbers["cpu_seconds"] = time.process_time() - start
    return numbers


def health(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return what the routers did at the end of training, averaged over the layers."""
    found: dict[str, float] = {}
    lines = [row["routers"] for row in rows if row.get("routers")][-LAST:]
    for name in HEALTH:
        values = [layer[name] for line in lines for layer in line.values() if layer.get(name) is not None]
        if values:
            found[name] = fmean(values)
    return found


def decisive_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that can change a result and differ from the defaults: a new setting makes no new job."""
    usual = flatten(TrainConfig().to_dict()) | {"model.weights": config.model.weights}  # which its parent decides
    kept = {key: value for key, value in flatten(config.to_dict()).items() if value != usual.get(key)}
    return {key: value for key, value in kept.items() if key in COUNTS or not any(matches(key, rule) for rule in FREE)}


def price(config: TrainConfig) -> Cost:
    """Return the cost of the model, of its image tower where there are two."""
    return cost(image_shape(config))


def image_shape(config: TrainConfig) -> ViTConfig:
    classes = class_count(config.data.train, config.data.train_split) if config.text.size is None else None
    return config.model.resolve(classes, config.data.transform.image_size)


def full_shape(config: TrainConfig) -> ViTConfig | TwoTowerConfig:
    image = image_shape(config)
    return image if config.text.size is None else config.text.resolve(image, config.text.vocab_size)


def priced(known: Cost) -> dict[str, float]:
    return {"params": known.params, "mflops": known.forward_flops / 1e6}


@cache
def class_count(data: str, split: str) -> int | None:
    return len(open_source(data, split).classes) or None
