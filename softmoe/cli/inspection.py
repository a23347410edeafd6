"""`softmoe inspect` and `softmoe doctor`: what the routers of a model do, and what is wrong with it."""

import json
import sys
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from softmoe.cli.parse import parse, percent_on_terminal
from softmoe.evaluate.api import OneModel, OverImages

if TYPE_CHECKING:
    from softmoe.data import Source
    from softmoe.inspection import Inspection
    from softmoe.inspection.doctor import Verdict
    from softmoe.report import RunRecord


@dataclass(frozen=True)
class InspectArguments(OneModel, OverImages):
    """Look inside a model: write figures, inspect.json and inspect.html."""

    data: str
    """Source of images: a folder with SPLIT/CLASS/IMAGE, or shapes, wds:PATTERN, hf:NAME, idx:PATH, digits."""
    _: KW_ONLY
    split: str = "val"
    images: int = 16
    """Images to show in full on the page."""
    examples: int | None = 1024
    """Images for the statistics, chosen at random (always the same ones); None is all."""
    compare: str | None = None
    """A second model, to stand beside the first."""
    out: Path | None = None
    """Folder to write into; the run's own if MODEL is one, else ./inspect."""
    batch_size: int = 32


def inspect_command(argv: list[str]) -> int:
    a = parse(InspectArguments, argv, "inspect")

    from softmoe.inspection import plots
    from softmoe.inspection.page import layers_text, notes_of, write_inspection

    names = [str(a.model), *([a.compare] if a.compare else [])]
    models = [look(a, name) for name in names]
    title = f"Inside {' and '.join(model.name for model in models)}"
    folder = a.out or (Path(a.model) if (Path(a.model) / "metrics.jsonl").is_file() else Path("inspect"))
    written = write_inspection(models, folder, title=title, about={"data": a.data, "split": a.split})
    for model in models:
        print(f"{model.name}: {model.images:,} images\n{layers_text(model)}\n")
    print("\n".join(f"{columns}: {meaning}" for columns, meaning in notes_of(models)) + "\n")
    if not plots.available():
        print("softmoe: no figures were drawn, they need matplotlib: pip install 'softmoe-vit[plots]'", file=sys.stderr)
    for path in written:
        if path.suffix != ".svg":
            print(path)
    return 0


def look(a: InspectArguments, name: str) -> "Inspection":
    from softmoe.data import open_source
    from softmoe.evaluate import load
    from softmoe.evaluate.inputs import random_subset
    from softmoe.inspection.collect import inspect_source

    loaded = load(name, told=a.told if name == str(a.model) else None, **a.model_options)
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
        about={"model": name, "fingerprint": loaded.saved.fingerprint, "data_fingerprint": source.fingerprint},
        progress=percent_on_terminal("inspecting"),
    )


@dataclass(frozen=True)
class DoctorArguments(OneModel, OverImages):
    """Check a model or a run. Exit code 0 if nothing is wrong, 1 if something is."""

    data: str | None = None
    """Source of images; of a run its own validation images if not given."""
    _: KW_ONLY
    split: str | None = None
    """val if not given, or what the run used."""
    images: int = 64
    """Images to look at, chosen at random (always the same ones)."""
    batch_size: int = 32
    json: bool = False
    """Print as JSON."""


def doctor_command(argv: list[str]) -> int:
    a = parse(DoctorArguments, argv, "doctor")

    from softmoe.report import load_run

    run = load_run(a.model) if (Path(a.model) / "metrics.jsonl").is_file() else None
    verdicts = [*model_verdicts(a, run), *(run_verdicts(run) if run else [])]
    wrong = sum(v.wrong is True for v in verdicts)
    if a.json:
        print(
            json.dumps({"model": str(a.model), "wrong": wrong, "verdicts": [v.to_dict() for v in verdicts]}, indent=2)
        )
    else:
        print("\n".join(verdict_line(v) for v in verdicts))
        print(f"\n{a.model}: {verdict_summary(verdicts, wrong)}")
    return 1 if wrong else 0


def model_verdicts(a: DoctorArguments, run: "RunRecord | None") -> "list[Verdict]":
    from softmoe.data import evaluation_batches
    from softmoe.evaluate import load
    from softmoe.inspection.collect import layer_results
    from softmoe.inspection.doctor import (
        Verdict,
        examine_acceleration,
        examine_layers,
        examine_machine,
        examine_parameters,
    )
    from softmoe.inspection.statistics import correlation_summary
    from softmoe.moe.record import moe_layers

    loaded = load(a.model, told=a.told, **a.model_options)
    model = loaded.model
    weights = next(model.parameters())
    precision = run.config.precision if run else str(weights.dtype).removeprefix("torch.")
    machine = [examine_machine(precision, weights.device.type), examine_acceleration(model)]
    moe = model.config.moe
    if moe is None:
        return [*machine, Verdict("routing", None, "this model has no MoE layers")]
    summaries = {name: correlation_summary(router) for name, router in moe_layers(model).items()}
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


def images_of(a: DoctorArguments, run: "RunRecord | None") -> "Source | None":
    from softmoe.data import open_source
    from softmoe.evaluate.inputs import random_subset

    name, split = a.data, a.split or "val"
    if name is None and run is not None:
        d = run.config.data
        name, split = d.val or d.train, a.split or d.val_split
    return None if name is None else random_subset(open_source(name, split), a.images)


def run_verdicts(run: "RunRecord") -> "list[Verdict]":
    from softmoe.data import Transform, open_source
    from softmoe.data.batch import TrainBatches
    from softmoe.inspection.doctor import Verdict, examine_accuracy, examine_history, examine_loading
    from softmoe.train.data import buffers_of

    c, d = run.config, run.config.data
    found = [*examine_history(run.rows, c.schedule.warmup), *examine_accuracy(run.rows, run.classes)]
    try:
        source = open_source(d.train, d.train_split)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        return [*found, Verdict("data loading", None, f"the run's images cannot be opened: {error}")]
    batches = TrainBatches(source, Transform(d.transform, train=True), d.batch_size, c.seed, 1, 0)
    workers = buffers_of(d, d.batch_size, c.device).workers
    return [*found, examine_loading(run.rows, workers, batches, d.batch_size)]


def verdict_summary(verdicts: "list[Verdict]", wrong: int) -> str:
    """Say what was looked at, and what came of it."""
    known = [v.check for v in verdicts if v.wrong is not None]
    left = len(verdicts) - len(known)
    told = f"{wrong} of {len(known)} checks found something wrong" if wrong else "nothing is wrong"
    return f"{told} ({', '.join(dict.fromkeys(known))})" + (f"; {left} could not be judged" if left else "")


def verdict_line(v: "Verdict") -> str:
    mark = {True: "WRONG", False: "ok", None: "-"}[v.wrong]
    text = f"{mark:<6} {v.check}: {v.figure}" + (f" (limit: {v.limit})" if v.limit else "")
    return f"{text}\n       {v.advice}" if v.wrong else text
