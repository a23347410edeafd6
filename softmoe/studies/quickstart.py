"""The first thing to run: a small Soft MoE and its dense twin on `shapes`, at equal FLOPs, side by side."""

from dataclasses import dataclass, replace
from pathlib import Path

from softmoe.data import Transform, open_source
from softmoe.evaluate.inputs import random_subset
from softmoe.inspection.inspect import inspect_source, write_inspection
from softmoe.recipes import quickstart, quickstart_dense
from softmoe.report import RunRecord, load_run, write_report
from softmoe.report.runs import comparison, save_png
from softmoe.storage import from_pretrained
from softmoe.train import TrainConfig, train
from softmoe.train.folder import write_model

TITLE = "A small Soft MoE and its dense twin"


@dataclass(frozen=True)
class Quickstart:
    """The results of the quickstart. `records` is empty when a signal ended it early; calling again goes on."""

    records: list[RunRecord]
    curves: Path | None = None
    report: Path | None = None
    inside: Path | None = None


def run_quickstart(runs: Path, *, seed: int = 0, tiny: bool = False) -> Quickstart:
    """Train both, or go on where an earlier call was stopped, and write curves.png and report.html."""
    records, inside = [], None
    for module in (quickstart, quickstart_dense):
        config = placed(module.tiny() if tiny else module.recipe(), runs, module.__name__.rsplit(".", 1)[1], seed)
        print(f"training {config.run_name}", flush=True)
        result = train(config)
        if result.signal is not None:
            return Quickstart([])
        write_model(result.folder)
        if not records:
            inside = look_inside(config, result.folder.path, images=4 if tiny else 256)
        records.append(load_run(result.folder.path))
    lead = (
        "Both models cost the same FLOPs to train and see the same stream of generated images. "
        "Curves against computation and time: higher, and further to the left, is better.",
    )
    picture = save_png(comparison(records), runs / "quickstart.png")
    page = write_report(records, runs / records[0].name / "report.html", title=TITLE, lead=lead)
    return Quickstart(records, picture, page, inside)


def look_inside(config: TrainConfig, folder: Path, images: int) -> Path:
    """Write the figures that the report shows, and the page on which one can see what each slot looks at."""
    source = random_subset(open_source(config.data.train, config.data.val_split), images, seed=0)
    transform = Transform(config.data.transform, train=False)
    classes = tuple(source.classes)
    seen = inspect_source(from_pretrained(folder), source, transform, name=config.run_name, classes=classes)
    about = {"data": config.data.train, "split": config.data.val_split}
    write_inspection([seen], folder, title=f"Inside {config.run_name}", about=about)
    return folder / "inspect.html"


def placed(config: TrainConfig, runs: Path, name: str, seed: int) -> TrainConfig:
    return replace(config, runs=str(runs), run_name=name if seed == 0 else f"{name}_seed{seed}", seed=seed)
