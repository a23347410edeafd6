"""`softmoe sweep RECIPE KEY=V1,V2 ...`: a run for each combination of values, and one table of all."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from softmoe.cli import finetune, train
from softmoe.cli.parse import unused

USAGE = """usage: softmoe sweep RECIPE KEY=V1,V2,... [KEY=...] [--data DATA] [--section.key value ...]
       softmoe sweep finetune MODEL DATA KEY=V1,V2,... [--section.key value ...]

RECIPE, MODEL and DATA as in softmoe train and softmoe finetune; KEY as there, or its last part: lr=1e-3,3e-3 seed=0,1.
Each combination is a run of its own, named after its values; those that are done are not done again. At the end there
is one table and one page. --dry-run lists the runs."""


def main(argv: list[str]) -> int:
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
    folders = []
    for number, cell in enumerate(cells, 1):
        settings = [word for key, value in cell.items() for word in (f"--{key}", value)]
        settings = [*(word for word in options if word != "--dry-run"), *settings, "--run-name", name_of(what[0], cell)]
        tuned = what[0] == "finetune"
        config, _ = finetune.parse(what[1], what[2], settings) if tuned else train.parse(what[0], settings)
        folders.append(Path(config.runs) / config.run_name)
        print(f"run {number} of {len(cells)}: {folders[-1]}", flush=True)
        code = 0 if dry else train.drive(config, False)
        if code:
            return code
    if not dry:
        show(cells, folders)
    return 0


def name_of(recipe: str, cell: dict[str, str]) -> str:
    parts = [Path(recipe).stem, *(f"{key.rsplit('.', 1)[-1]}_{value}" for key, value in cell.items())]
    return re.sub(r"[^\w.\-]+", "-", "_".join(parts))


def show(cells: list[dict[str, str]], folders: list[Path]) -> None:
    from softmoe.report import load_run, table_text, write_report
    from softmoe.report.page import number_cell

    runs = [load_run(folder) for folder in folders]
    best = ("best top-1 %", "last loss", "seconds")
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
    print(write_report(runs, unused(folders[0].parent / "sweep.html"), title="Sweep over " + ", ".join(cells[0])))
