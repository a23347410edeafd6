"""`softmoe study NAME`: one of the paper's experiments, at a size of your choice."""

from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from softmoe.cli.parse import parse


@dataclass(frozen=True)
class Arguments:
    """Run one of the paper's experiments: its grid, its figure with the paper's numbers beside, and a verdict."""

    names: tuple[str, ...]
    """Names of studies; `softmoe study` lists them. They share the runs they have in common."""
    _: KW_ONLY
    scale: Literal["tiny", "small", "paper"] = "small"
    """tiny: seconds, on generated images; small: 45 seconds a run on one core; paper: as the paper did it."""
    recipe: str | None = None
    """A recipe whose model, data and settings are studied instead of a scale's, for example quickstart."""
    data: str | None = None
    """Training data: a folder with train/CLASS/* and val/CLASS/*, or a source as in training."""
    transfer: str | None = None
    """Data of other classes: adds the accuracy of 10 images a class on each model's features."""
    seeds: int | None = None
    """Runs of each cell; 3 at scale small, else 1. One seed gives no interval."""
    steps: int | None = None
    """Steps of each run, instead of the scale's."""
    out: Path = Path("studies")
    """Runs, tables, figures and verdicts go here. What is done already is not done again."""
    jobs: int = 1
    """Runs at the same time, a process of one thread (and one GPU, if there are) each."""
    collect: bool = False
    """Run nothing: write table, figure and verdict of what is done."""
    dry_run: bool = False
    """Print the number of runs, FLOPs and time, and stop."""


def main(argv: list[str]) -> int:
    from softmoe.studies import about, find, names

    if not argv:
        print("usage: softmoe study NAME... [--help]\n\n" + "\n".join(f"  {name:<20}{about(name)}" for name in names()))
        return 2
    a = parse(Arguments, argv, "study")
    studies = [find(name) for name in a.names]

    from softmoe.studies.driver import Store, estimate, run_study
    from softmoe.studies.lab import make_lab

    check(a)
    lab = make_lab(a.scale, a.data, a.seeds, a.transfer, a.steps, a.recipe)
    store = Store(a.out, a.transfer)
    failed = False
    for study in studies:
        if a.dry_run:
            print(estimate(study, lab, store))
            continue
        tiny = a.scale == "tiny" and a.recipe is None
        say = partial(print, flush=True)
        done = run_study(study, lab, store, jobs=a.jobs, collect=a.collect, verdict=not tiny, say=say)
        if done.stopped:
            print("stopped; the same command goes on from here")
            return 130
        if tiny:
            print("  smoke test: all parts work; three steps say nothing about the question, so there is no verdict")
        for claim in done.claims:
            print(f"  {claim.word:<28}{claim.text}: {claim.found or '-'}")
        print("\n".join(f"  {path}" for path in done.files))
        failed = failed or bool(done.failures)
    return int(failed)


def check(a: Arguments) -> None:
    for name, value in (("--seeds", a.seeds), ("--jobs", a.jobs), ("--steps", a.steps)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
