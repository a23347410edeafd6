"""Run a study: do the jobs that are not done, one after another or several at a time, and write what came out.

    OUT/runs/<key>/           one folder a job, shared by all studies of OUT; result.json is written when it is done
    OUT/<study>/results.csv   a row per run that is done, rewritten after each
    OUT/<study>/{<study>.png, verdict.md, verdict.json}

Asked for again, a study goes on where it was stopped or killed; what is done is never done again. A job that fails is
reported, and the others go on.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from softmoe.storage.files import read_json, write_json, write_text
from softmoe.studies import Study
from softmoe.studies.jobs import Job, Stopped, key_of
from softmoe.studies.lab import Cell, Lab, make_lab
from softmoe.studies.results import QUALITY, Claim, Row, Table, write_verdict
from softmoe.studies.workers import Outcome, execute

Say = Callable[[str], None]
ALL = Study(())
"""All cells, one job at a time."""
SHARE = 0.2  # of the machine's rate of products that we expect training to reach, where nothing was measured
SHOTS = 10
EXAMPLES = 2500
"""Training images of the transfer data that the shots are drawn from: more than twice as many as are needed."""


@dataclass(frozen=True)
class Store:
    """The jobs of a folder. A job's result.json is written when it is done, and read from then on."""

    out: Path
    transfer: str | None = None
    """Data of other classes, for the 10-shot accuracy of every trained model."""

    def folder(self, job: Job) -> Path:
        return self.out / "runs" / key_of(job)

    def numbers(self, job: Job) -> dict[str, float] | None:
        """Return the numbers of a job, or None if the job, or its transfer, is not done yet."""
        path = self.folder(job) / "result.json"
        if not path.is_file():
            return None
        result = read_json(path)
        if not self.wants_transfer(job):
            return result["numbers"]
        shot = result["transfer"].get(self.transfer)
        return None if shot is None else insert_after(result["numbers"], "top5", "10shot", shot)

    def wants_transfer(self, job: Job) -> bool:
        return self.transfer is not None and job.has_features

    def work(self, job: Job) -> dict[str, float]:
        """Do what is missing of a job, write it to its result.json, and return its numbers."""
        folder = self.folder(job)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "result.json"
        if not path.is_file():
            numbers = job.run(folder)
            write_json(path, {"job": job.identity(), "numbers": numbers, "transfer": {}})
        if self.wants_transfer(job):
            result = read_json(path)
            if self.transfer not in result["transfer"]:
                assert self.transfer is not None
                result["transfer"][self.transfer] = shot_accuracy(folder, self.transfer)
                write_json(path, result)
        numbers = self.numbers(job)
        assert numbers is not None
        return numbers

    def table(self, cells: Iterable[Cell]) -> Table:
        """Return the rows of the cells whose jobs are done."""
        found = ((cell, self.numbers(cell.job)) for cell in cells)
        return Table(tuple(Row(c.labels, c.seed, n, self.folder(c.job)) for c, n in found if n is not None))


def shot_accuracy(run: Path, data: str) -> float:
    """Return the 10-shot accuracy in percent: the mean over three draws, the penalty chosen without test images."""
    from softmoe.evaluate.api import fewshot

    report = fewshot(run, [data], shots=(SHOTS,), seeds=3, train_examples=EXAMPLES, test_examples=5000, cache=False)
    return 100.0 * report["fewshot"]["numbers"][f"{data}/{SHOTS}shot"]


def insert_after(numbers: dict[str, Any], key: str, name: str, value: float) -> dict[str, Any]:
    """Insert a number after another, for a readable order of columns."""
    pairs = list(numbers.items())
    place = next((i + 1 for i, (k, _) in enumerate(pairs) if k == key), len(pairs))
    return dict([*pairs[:place], (name, value), *pairs[place:]])


@dataclass(frozen=True)
class Done:
    """The outcome of a study: its table, claims, files and failures."""

    table: Table
    claims: list[Claim] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    stopped: bool = False


def lab_and_store(options: Study) -> tuple[Lab, Store]:
    """Make the lab and the store of a study; ValueError for options below one."""
    for name in ("seeds", "jobs", "steps", "slots"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    return make_lab(options), Store(options.out, options.transfer)


def run_studies(studies: list[ModuleType], options: Study, say: Say) -> Iterator[Done]:
    """Run the studies one after another, up to one that is stopped, and yield the end of each."""
    lab, store = lab_and_store(options)
    for study in studies:
        done = run_study(study, lab, store, options, verdict=not options.is_smoke_test, say=say)
        yield done
        if done.stopped:
            return


def estimates(studies: list[ModuleType], options: Study) -> list["Estimate"]:
    lab, store = lab_and_store(options)
    return [estimate(study, lab, store, options.only) for study in studies]


def run_study(
    study: ModuleType, lab: Lab, store: Store, options: Study = ALL, *, verdict: bool = True, say: Say = print
) -> Done:
    """Run a study and write its table, figure and verdict.

    With `options.collect` or `only` they are those of the jobs that are done. Without `verdict` only the table is
    written, for runs that are too short to mean anything.
    """
    cells = cells_of(study, lab)
    folder = store.out / name_of(study)
    pending = [] if options.collect else unfinished(chosen(cells, options.only), store)
    say(f"{name_of(study)}: {len(cells)} cells, {len(pending)} jobs to do")
    failures: dict[str, str] = {}
    try:
        for number, (job, outcome) in enumerate(execute(pending, store, options.jobs), start=1):
            if isinstance(outcome, str):
                failures[key_of(job)] = outcome
            say(f"  [{number}/{len(pending)}] {title(cells, job)}: {outcome_text(outcome)}")
            write_results(folder, store.table(cells))
    except (Stopped, KeyboardInterrupt):
        return Done(store.table(cells), failures=failures, stopped=True)
    table = complete(study, lab, store.table(cells))
    files = [write_results(folder, table)]
    if len(table) and verdict:
        claims = list(study.claims(table))
        files += conclude(study, lab, table, claims, folder)
        return Done(table, claims, files, failures)
    return Done(table, files=files, failures=failures)


def cells_of(study: ModuleType, lab: Lab) -> list[Cell]:
    """Return the cells of a study. The paper's layers combine; a study that says SLOTS_MAY_STAY takes others too."""
    return list(study.cells(lab if getattr(study, "SLOTS_MAY_STAY", False) else lab.combining()))


def complete(study: ModuleType, lab: Lab, table: Table) -> Table:
    """Add what the study computes itself: numbers of a run's folder (`measure`), and rows by formula (`rows`)."""
    measure = getattr(study, "measure", None)
    if measure is not None:
        table = Table(tuple(replace(row, numbers=row.numbers | measure(row)) for row in table))
    return Table((*table, *study.rows(lab))) if hasattr(study, "rows") else table


def conclude(study: ModuleType, lab: Lab, table: Table, claims: list[Claim], folder: Path) -> list[Path]:
    """Write the figure and the verdict."""
    from softmoe.report.runs import save_png

    trained = any(row.folder.name for row in table)
    notes = [f"{lab}. Runs: results.csv."] if trained else []
    notes += study.notes(table) if hasattr(study, "notes") else []
    picture = save_png(study.figure(table, lab), folder / f"{name_of(study)}.png")
    return [picture, *write_verdict(folder, name_of(study), (study.__doc__ or "").strip(), claims, notes)]


def chosen(cells: list[Cell], only: Sequence[str]) -> list[Cell]:
    """Return the cells with one of these words in a label, all if there are no words; ValueError if there is none."""
    found = [cell for cell in cells if not only or any(w in str(v) for w in only for v in cell.labels.values())]
    if only and not found:
        labels = dict.fromkeys(str(value) for cell in cells for value in cell.labels.values())
        raise ValueError(f"no cell has {' or '.join(only)} in a label; labels are {', '.join(labels)}")
    return found


def unfinished(cells: list[Cell], store: Store) -> list[Job]:
    """List the jobs to do, each once, after the one it needs, else in the order of the plan."""
    found: dict[str, Job] = {}

    def add(job: Job) -> None:
        if job.needs is not None:
            add(job.needs)
        if store.numbers(job) is None:
            found.setdefault(key_of(job), job)

    for cell in cells:
        add(cell.job)
    return list(found.values())


def write_results(folder: Path, table: Table) -> Path:
    return write_text(folder / "results.csv", table.to_csv())


def name_of(study: ModuleType) -> str:
    return study.__name__.rsplit(".", 1)[1]


def title(cells: list[Cell], job: Job) -> str:
    """Name a job by the labels of the first cell that wanted it."""
    for cell in cells:
        if key_of(cell.job) == key_of(job):
            labels = ", ".join(f"{key} {value}" for key, value in cell.labels.items())
            return f"{labels}, seed {cell.seed}"
    return f"{type(job).__name__.lower()} {key_of(job)}, which others need"


def outcome_text(outcome: Outcome) -> str:
    if isinstance(outcome, str):
        return f"failed, {outcome}"
    shown = [f"{name} {outcome[name]:.2f}" for name in (*QUALITY, "images_per_second") if name in outcome]
    return ", ".join([*shown, f"{outcome['seconds']:.0f} s" if "seconds" in outcome else ""]).rstrip(", ")


@dataclass(frozen=True)
class Estimate:
    study: str
    cells: int
    jobs: int
    """The number of jobs that are not done yet."""
    flops: float
    rate: float
    measured: bool

    def __str__(self) -> str:
        from softmoe.train.log import duration

        how = "as finished runs had here" if self.measured else f"assumed: {SHARE:.0%} of this machine's peak"
        return (
            f"{self.study}: {self.cells} cells, {self.jobs} jobs to do, {self.flops:.3g} FLOPs, "
            f"about {duration(self.flops / self.rate)} one after another ({self.rate:.3g} FLOP/s, {how})"
        )


def estimate(study: ModuleType, lab: Lab, store: Store, only: Sequence[str] = ()) -> Estimate:
    cells = cells_of(study, lab)
    pending = unfinished(chosen(cells, only), store)
    rate = measured_rate(store, cells)
    return Estimate(
        name_of(study), len(cells), len(pending), sum(job.flops() for job in pending), rate or assumed(), bool(rate)
    )


def measured_rate(store: Store, cells: list[Cell]) -> float | None:
    """Return the FLOPs a second of the finished runs among the cells."""
    rows = [row.numbers for row in store.table(cells) if row.numbers.get("seconds")]
    return sum(r["tflops"] * 1e12 for r in rows) / sum(r["seconds"] for r in rows) if rows else None


def assumed() -> float:
    import torch

    from softmoe.train.log import peak_flops

    return SHARE * peak_flops(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
