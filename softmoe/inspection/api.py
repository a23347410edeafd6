"""Commands as options, as in `softmoe.evaluate`: inspect and doctor. This file loads without torch."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from softmoe.evaluate.api import OneModel, OverImages
from softmoe.paths import unused_path

if TYPE_CHECKING:
    from softmoe.data import Source
    from softmoe.evaluate.features import Progress
    from softmoe.inspection.collect import Inspection
    from softmoe.inspection.doctor import Verdict
    from softmoe.train.folder import RunRecord


@dataclass(frozen=True)
class Inspect(OneModel, OverImages):
    """Look inside a model: write figures, inspect.json and inspect.html."""

    data: str
    """Source of images: a folder with [SPLIT/]CLASS/IMAGE, or shapes, wds:PATTERN, hf:NAME, idx:PATH, digits."""
    _: KW_ONLY
    split: str = "val"
    images: int = 16
    """Images to show in full on the page."""
    examples: int | None = 1024
    """Images for the statistics, chosen at random (always the same ones); None is all."""
    compare: str | None = None
    """A second model, to stand beside the first."""
    out: Path | None = None
    """New folder to write into. If not given: the run's own if MODEL is one, where the page of an earlier time is
    replaced, else ./inspect, with a number if there is one."""
    batch_size: int = 32

    def run(self, progress: Progress | None = None) -> tuple[list[Inspection], list[Path]]:
        """Write the page, and return what was found in each model and the files that were written."""
        from softmoe.inspection.page import write_inspection

        names = [str(self.model), *([self.compare] if self.compare else [])]
        models = [look(self, name, progress) for name in names]
        title = f"Inside {' and '.join(model.name for model in models)}"
        folder = self.out or (Path(self.model) if is_run(self.model) else unused_path(Path("inspect")))
        return models, write_inspection(models, folder, title=title, about={"data": self.data, "split": self.split})


@dataclass(frozen=True)
class Doctor(OneModel, OverImages):
    """Check a model or a run."""

    data: str | None = None
    """Source of images; of a run its own validation images if not given."""
    _: KW_ONLY
    split: str | None = None
    """val if not given, or what the run used."""
    images: int = 64
    """Images to look at, chosen at random (always the same ones)."""
    batch_size: int = 32

    def run(self) -> list[Verdict]:
        """Return the outcome of every check that can be made."""
        from softmoe.train.folder import load_run

        run = load_run(self.model) if is_run(self.model) else None
        return [*model_verdicts(self, run), *(run_verdicts(run) if run else [])]


def is_run(model: str | Path) -> bool:
    """Tell if a model is named by the folder of its run."""
    return (Path(model) / "metrics.jsonl").is_file()


def look(a: Inspect, name: str, progress: Progress | None) -> Inspection:
    """Look into one model of the command."""
    from softmoe.data import open_source
    from softmoe.evaluate import load
    from softmoe.evaluate.inputs import random_subset
    from softmoe.inspection.collect import inspect_source

    loaded = load(name, foreign_options=a.foreign_options if name == str(a.model) else None, **a.model_options)
    source = random_subset(open_source(a.data, a.split), a.examples)
    classes = loaded.saved.classes or (source.classes if len(source.classes) == loaded.model.config.num_classes else ())
    return inspect_source(
        loaded.model,
        source,
        loaded.transform,
        name=Path(name).name or name,
        images=a.images,
        batch_size=a.batch_size,
        workers=a.workers,
        classes=classes,
        loss=loaded.loss,
        about={"model": name, "fingerprint": loaded.saved.fingerprint, "data_fingerprint": source.fingerprint},
        progress=progress,
    )


def model_verdicts(a: Doctor, run: RunRecord | None) -> list[Verdict]:
    """Judge the model: what its weights tell, and what its routers do on images."""
    from softmoe.data import evaluation_batches
    from softmoe.evaluate import load
    from softmoe.inspection.collect import layer_results
    from softmoe.inspection.doctor import (
        Verdict,
        accelerate_and_tell,
        examine_layers,
        examine_machine,
        examine_parameters,
    )
    from softmoe.inspection.statistics import correlation_summary
    from softmoe.moe.record import routers_by_layer

    loaded = load(a.model, foreign_options=a.foreign_options, **a.model_options)
    model = loaded.model
    weights = next(model.parameters())
    precision = run.config.precision if run else str(weights.dtype).removeprefix("torch.")
    machine = [examine_machine(precision, weights.device.type), accelerate_and_tell(model)]
    moe = model.config.moe
    if moe is None:
        return [*machine, Verdict("routing", None, "this model has no MoE layers")]
    summaries = {name: correlation_summary(router) for name, router in routers_by_layer(model).items()}
    slots = {name: summary for name, summary in summaries.items() if summary is not None}
    found = [*machine, *examine_parameters(slots, moe.num_experts, model.config.tokens)]
    try:
        source = images_of(a, run)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        if a.data is not None:
            raise
        return [*found, Verdict("routing on images", None, f"the run's images cannot be opened: {error}")]
    if source is None:
        return [*found, Verdict("routing on images", None, "no data was given: softmoe doctor MODEL DATA")]
    made = evaluation_batches(source, loaded.transform, a.batch_size, workers=a.workers)
    batches = (batch.images for batch in made)
    return found + examine_layers(layer_results(model, batches)[1])


def images_of(a: Doctor, run: RunRecord | None) -> Source | None:
    """Return the images that are asked for, or else the run's own; None if there are none."""
    from softmoe.data import open_source
    from softmoe.evaluate.inputs import random_subset

    name, split = a.data, a.split or "val"
    if name is None and run is not None:
        d = run.config.data
        name, split = d.val or d.train, a.split or d.val_split
    return None if name is None else random_subset(open_source(name, split), a.images)


def run_verdicts(run: RunRecord) -> list[Verdict]:
    """Judge the course of a run, its accuracy, and if its images came in time."""
    from softmoe.data import Transform, open_source
    from softmoe.data.batch import TrainBatches
    from softmoe.inspection.doctor import Verdict, examine_accuracy, examine_history, examine_loading
    from softmoe.train.data import buffers_of
    from softmoe.train.preview import on_cuda

    c, d = run.config, run.config.data
    found = [*examine_history(run.rows, c.schedule.warmup), *examine_accuracy(run.rows, run.classes)]
    try:
        source = open_source(d.train, d.train_split)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        return [*found, Verdict("data loading", None, f"the run's images cannot be opened: {error}")]
    batches = TrainBatches(source, Transform(d.transform, train=True), d.batch_size, c.seed, 1, 0)
    workers = buffers_of(d, d.batch_size, "cuda" if on_cuda(c) else "cpu").workers
    return [*found, examine_loading(run.rows, workers, batches, d.batch_size)]
