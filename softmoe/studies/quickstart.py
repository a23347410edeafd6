"""The first things to run: the small model that comes with the package, shown; and a small Soft MoE, trained.

The latter learns `characters` beside its controls and its dense twin, with a page on what slots, experts and a place
give.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image

from softmoe.convert import from_pretrained
from softmoe.data import Transform, open_source
from softmoe.evaluate import load, predict
from softmoe.evaluate.inputs import random_subset
from softmoe.inspection.collect import inspect_source
from softmoe.inspection.page import write_inspection, write_page
from softmoe.paths import unused_path
from softmoe.recipes import quickstart, quickstart_dense
from softmoe.report import RunRecord, load_run, write_report
from softmoe.report.runs import comparison, save_png
from softmoe.storage.saved import DEMO
from softmoe.studies import Demo, Quickstart
from softmoe.studies.catalog.controls import CLAIMS, METHODS, draw_gains
from softmoe.studies.driver import Store, outcome_text
from softmoe.studies.jobs import Job, Stopped, Training
from softmoe.studies.results import Row, Table
from softmoe.studies.workers import execute
from softmoe.train import TrainConfig
from softmoe.train.folder import RunFolder, write_model

DEMO_DATA = "shapes?size=48"
DEMO_EXAMPLES = 64  # pictures for the statistics of the page
MOST_PICTURES = 288  # one of each class


@dataclass(frozen=True)
class Shown:
    """A picture the model was not trained on, what it shows, and what the model takes it for."""

    path: Path
    shows: str
    taken_for: str
    probability: float


def run_demo(demo: Demo) -> tuple[list[Shown], Path]:
    """Draw pictures into the folder, predict them, and write the inspection page; returns both."""
    folder, pictures = demo.out or unused_path(Path("softmoe_demo")), demo.pictures
    if not 1 <= pictures <= MOST_PICTURES:
        raise ValueError(f"the number of pictures is from 1 to {MOST_PICTURES}, got {pictures}")
    loaded = load(DEMO, device="cpu")
    source = random_subset(open_source(DEMO_DATA, "val"), pictures, seed=1)
    truth: dict[Path, str] = {}
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    for index in range(len(source)):
        example = source[index]
        path = folder / "pictures" / f"{index + 1}.png"
        Image.fromarray(example.image).save(path)
        truth[path] = source.classes[example.labels[0]]
    predictions, _ = predict(DEMO, list(truth), device="cpu")
    shown = [Shown(Path(p.name), truth[Path(p.name)], *p.top[0]) for p in predictions]
    statistics = random_subset(open_source(DEMO_DATA, "val"), DEMO_EXAMPLES)
    inside = inspect_source(
        loaded.model, statistics, loaded.transform, name="demo", images=pictures, classes=loaded.class_names()
    )
    lead = f"{inside.images} pictures of {DEMO_DATA} that it was not trained on."
    return shown, write_page([inside], folder / "inspect.html", title="Inside the demo model", lead=lead)


TITLE = "A small Soft MoE, its controls and its dense twin"
LEAD = (
    "A thousand characters, drawn from fonts without end; a narrow model and few steps. Every model sees the same "
    "pictures in the same order. Those with slots have as many slots as tokens, so a step costs what a dense one "
    "costs; the dense model has a quarter more steps, so a fifth more FLOPs than the others, and the learning rate "
    "that was its best of three, twice theirs. Identity has an expert for each place and mixes nothing. More controls, "
    "seeds and intervals: softmoe study controls --recipe quickstart."
)
NAMES = {  # of the runs, and the methods of the study `controls` that they are
    "quickstart_dense": "dense",
    "quickstart_one_expert": "one",
    "quickstart_soft": "soft",
    "quickstart_identity": "identity",
    "quickstart_placed_one_expert": "placed one",
    "quickstart": "placed",
}


@dataclass(frozen=True)
class Compared:
    """The results of the quickstart. `records` is empty when a signal ended it early; calling again goes on."""

    records: list[RunRecord]
    findings: tuple[str, ...] = ()
    """What slots, experts and a place gave, a sentence each."""
    curves: Path | None = None
    gains: Path | None = None
    report: Path | None = None
    inside: Path | None = None


def run_quickstart(a: Quickstart) -> Compared:
    """Train all models, or go on where an earlier call was stopped; write two pictures and a page."""
    if a.jobs is not None and a.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {a.jobs}")
    configs = models(a.runs, a.seed, a.tiny)
    jobs = min(a.jobs or os.cpu_count() or 1, len(configs))
    print(f"training {len(configs)} models, {jobs} at a time; each says a line when it is done", flush=True)
    numbers: dict[str, dict[str, float]] = {}
    try:
        for job, outcome in execute([Training(config) for config in configs], Named(a.runs), jobs):
            name = job.config.run_name  # pyright: ignore[reportAttributeAccessIssue]
            print(f"  [{len(numbers) + 1}/{len(configs)}] {name}: {outcome_text(outcome)}", flush=True)
            if isinstance(outcome, str):
                raise ValueError(f"the run {name} {outcome_text(outcome)}")
            numbers[name] = outcome
    except (Stopped, KeyboardInterrupt):
        return Compared([])
    return conclude(configs, numbers, a.runs, images=4 if a.tiny else 256)


@dataclass(frozen=True)
class Named(Store):
    """Runs in folders of their own names, judged by what the loop says: one that is done is not trained again."""

    def folder(self, job: Job) -> Path:
        assert isinstance(job, Training)
        return self.out / job.config.run_name

    def work(self, job: Job) -> dict[str, float]:
        return job.run(self.folder(job))


def models(runs: Path, seed: int, tiny: bool) -> list[TrainConfig]:
    """Return the settings of all runs, the one to look inside last."""
    flagship, dense = (module.tiny() if tiny else module.recipe() for module in (quickstart, quickstart_dense))
    slots = flagship.model.resolve(None, quickstart.IMAGE).moe.num_experts  # pyright: ignore[reportOptionalMemberAccess]
    one = {"num_experts": 1, "slots_per_expert": slots}
    changes: dict[str, dict[str, Any]] = {
        "one": {"router": "soft", **one},
        "soft": {"router": "soft"},
        "identity": {"router": "identity"},
        "placed one": one,
        "placed": {},
    }
    found = []
    for name, method in NAMES.items():
        config = dense if method == "dense" else replace(flagship, model=flagship.model.change(**changes[method]))
        named = replace(config, runs=str(runs), run_name=name if seed == 0 else f"{name}_seed{seed}", seed=seed)
        found.append(replace(named, threads=1, log=replace(config.log, quiet=True)))
    return found


def conclude(configs: list[TrainConfig], numbers: dict[str, dict[str, float]], runs: Path, images: int) -> Compared:
    for config in configs:
        write_model(RunFolder.of(config))
    flagship = configs[-1]
    inside = look_inside(flagship, runs / flagship.run_name, images)
    table = Table(
        tuple(
            Row({"method": method}, config.seed, numbers[config.run_name])
            for config, method in zip(configs, NAMES.values(), strict=True)
        )
    )
    findings = tuple(sentences(table))
    records = [load_run(runs / config.run_name) for config in configs]
    curves = save_png(comparison(records), runs / "quickstart.png")
    gains = save_png(draw_gains(table), runs / "quickstart_gains.png")
    page = write_report(
        records,
        runs / flagship.run_name / "report.html",
        title=TITLE,
        lead=(LEAD, *findings),
        figures=(("What slots, experts and a place give", draw_gains(table)),),
    )
    return Compared(records, findings, curves, gains, page, inside)


def sentences(table: Table) -> list[str]:
    """Say what each part gave, those that took something away alike."""
    found = []
    for first, second, what in CLAIMS:
        gain = table.where(method=first).minus(table.where(method=second), "top1")
        if gain is not None:
            means = [table.where(method=method).mean("top1") for method in (first, second)]
            names = f"{METHODS[first]} {means[0]:.1f} %, {METHODS[second]} {means[1]:.1f} %"
            found.append(f"{what[0].upper()}{what[1:]}: {gain.mean:+.1f} points ({names}; one seed)")
    return found


def look_inside(config: TrainConfig, folder: Path, images: int) -> Path:
    """Write the figures that the report shows, and the page on which one can see what each slot looks at."""
    source = random_subset(open_source(config.data.train, config.data.val_split), images, seed=0)
    transform = Transform(config.data.transform, train=False)
    classes = tuple(source.classes)
    seen = inspect_source(from_pretrained(folder), source, transform, name=config.run_name, classes=classes)
    about = {"data": config.data.train, "split": config.data.val_split}
    write_inspection([seen], folder, title=f"Inside {config.run_name}", about=about)
    return folder / "inspect.html"
