"""`softmoe demo` and `quickstart`: what to run first; `sweep`, `study` and `report`: several runs, compared."""

from __future__ import annotations

import itertools
import re
import sys
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path

from softmoe.cli.parse import parse
from softmoe.cli.train import drive, parse_train, take
from softmoe.cli.transfer import parse_finetune
from softmoe.paths import unused_path
from softmoe.storage.hub import check_run
from softmoe.studies import Demo, Quickstart, Study, about, names

USAGE = """usage: softmoe sweep RECIPE KEY=V1,V2,... [KEY=...] [--data DATA] [--section.key value ...]
       softmoe sweep finetune MODEL DATA KEY=V1,V2,... [--section.key value ...]

RECIPE, MODEL and DATA as in softmoe train and softmoe finetune; KEY as there, or its last part: lr=1e-3,3e-3 seed=0,1.
Each combination is a run of its own, named after RECIPE (or --run-name) and its values; those that are done are not
done again. At the end there is one table and one page. --dry-run lists the runs."""


def sweep_command(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if argv else 2
    first = next((i for i, word in enumerate(argv) if word.startswith("--")), len(argv))
    words, options = argv[:first], argv[first:]
    grid = dict(word.split("=", 1) for word in words if re.fullmatch(r"[\w.\-]+=.+", word))
    what = [word for word in words if word.split("=", 1)[0] not in grid]
    if not grid or not what:
        raise ValueError("give a recipe and values: softmoe sweep RECIPE lr=1e-3,3e-3")
    if what[0] == "finetune" and len(what) != 3:
        raise ValueError("give a model and data: softmoe sweep finetune MODEL DATA lr=1e-3,3e-3")
    values = itertools.product(*(value.split(",") for value in grid.values()))
    cells = [dict(zip(grid, row, strict=True)) for row in values]
    dry = "--dry-run" in options
    name, options = take([word for word in options if word != "--dry-run"], "--run-name")
    configs = []
    for cell in cells:
        settings = [word for key, value in cell.items() for word in (f"--{key}", value)]
        settings = [*options, *settings, "--run-name", name_of(name or Path(what[0]).stem, cell)]
        tuned = what[0] == "finetune"
        configs.append((parse_finetune(what[1], what[2], settings) if tuned else parse_train(what[0], settings))[0])

    from softmoe.train.preview import preview

    for config in configs:
        preview(config)  # a value that cannot work shall not wait for the runs before it
    folders = [Path(config.runs) / config.run_name for config in configs]
    for number, (config, folder) in enumerate(zip(configs, folders, strict=True), 1):
        print(f"run {number} of {len(cells)}: {folder}", flush=True)
        code = 0 if dry else drive(config, False)
        if code:
            return code
    if not dry:
        show_sweep(cells, folders)
    return 0


def name_of(start: str, cell: dict[str, str]) -> str:
    parts = [start, *(f"{key.rsplit('.', 1)[-1]}_{value}" for key, value in cell.items())]
    return re.sub(r"[^\w.\-]+", "-", "_".join(parts))


def show_sweep(cells: list[dict[str, str]], folders: list[Path]) -> None:
    from softmoe.inspection.page import number_cell
    from softmoe.report import load_run, table_text, write_report
    from softmoe.report.runs import accuracy_name

    runs = [load_run(folder) for folder in folders]
    best = (f"best {accuracy_name(runs)} %", "last loss", "seconds")
    rows = [
        (
            *cell.values(),
            number_cell(max((row["val/top1"] for row in run.rows if "val/top1" in row), default=None), ".2f", 100),
            number_cell(run.last("val/loss"), ".4f"),
            number_cell(run.last("device_seconds"), ",.0f"),
        )
        for cell, run in zip(cells, runs, strict=True)
    ]
    print(f"\n{table_text([(*cells[0], *best), *rows])}")
    print(write_report(runs, unused_path(folders[0].parent / "sweep.html"), title="Sweep over " + ", ".join(cells[0])))


def study_command(argv: list[str]) -> int:
    if not argv:
        print("usage: softmoe study NAME... [--help]\n\n" + "\n".join(f"  {name:<20}{about(name)}" for name in names()))
        return 2
    a = parse(Study, argv, "study")
    if a.dry_run:
        print("\n".join(map(str, a.estimates())))
        return 0
    failed = False
    for done in a.run(partial(print, flush=True)):
        if done.stopped:
            print("stopped; the same command goes on from here")
            return 130
        if a.is_smoke_test:
            print("  smoke test: all parts work; three steps say nothing about the question, so there is no verdict")
        for claim in done.claims:
            print(f"  {claim.word:<28}{claim.text}: {claim.found or '-'}")
        print("\n".join(f"  {path}" for path in done.files))
        failed = failed or bool(done.failures)
    return int(failed)


@dataclass(frozen=True)
class ReportArguments:
    """Write a page with the table, curves, differing settings and router health of runs."""

    runs: tuple[Path, ...]
    """Folders of runs."""
    _: KW_ONLY
    out: Path | None = None
    """Where the page goes; report.html in the first run's folder if not given."""
    title: str | None = None
    """Title of the page."""


def report_command(argv: list[str]) -> int:
    a = parse(ReportArguments, argv, "report")
    if not a.runs:
        raise ValueError("give the folders of runs: softmoe report RUNS...")
    early = [f for f in a.runs if (f / "checkpoints").is_dir() and not (f / "metrics.jsonl").exists()]
    runs = [folder for folder in a.runs if folder not in early]
    for folder in runs:
        check_run(folder)  # a typo shall not wait for torch
    for folder in early:
        print(f"softmoe: {folder} is left out: the run stopped before its first metrics", file=sys.stderr)
    if not runs:
        raise ValueError("none of the runs has metrics yet: softmoe train RUN continues one")

    from softmoe.report import load_run, refitted_heads, summary_table, table_text, write_report

    records = [load_run(folder) for folder in runs]
    for record in records:
        if record.damaged:
            print(f"{record.folder}: {record.damaged} damaged lines of metrics.jsonl are left out")
    print("\n".join([table_text(summary_table(records)), *refitted_heads(records)]))
    print(write_report(records, a.out or runs[0] / "report.html", title=a.title))
    return 0


def demo_command(argv: list[str]) -> int:
    a = parse(Demo, argv, "demo")
    shown, page = a.run()
    right = 0
    for picture in shown:
        right += picture.shows == picture.taken_for
        answer = "right" if picture.shows == picture.taken_for else f"shows: {picture.shows}"
        print(f"{picture.path}: {picture.taken_for} {picture.probability:.0%} ({answer})")
    print(f"{right} of {len(shown)} right, of 288 classes, on pictures it was not trained on\n")
    print(f"what the slots look at, to open in a browser:\n  {page.resolve()}\n")
    print("the model is called `demo` wherever a model is asked for:")
    print(f"  softmoe predict demo {shown[0].path}")
    print('  softmoe fewshot demo "shapes?size=48&classes=downstream"')
    print("  softmoe finetune demo PHOTOS --image-size 96")
    return 0


def quickstart_command(argv: list[str]) -> int:
    a = parse(Quickstart, argv, "quickstart")
    done = a.run()
    if not done.records:
        print("stopped; `softmoe quickstart` goes on from here")
        return 130

    from softmoe.report import summary_table, table_text

    print()
    print(table_text(summary_table(done.records)))
    print()
    print("\n".join(done.findings))
    print(f"\ncurves  {done.curves}\ngains   {done.gains}\ninside  {done.inside}\nreport  {done.report}")
    return 0
