"""Write one self-contained HTML page for one or several runs: what they cost and reached, and how they differ.

Few-shot accuracies, inspection figures and mistakes come into it from files that other commands left in a run's folder
(`softmoe train` leaves the mistakes):

    softmoe fewshot RUN DATA --out RUN/fewshot.json
    softmoe inspect RUN DATA
"""

import base64
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from softmoe import __version__
from softmoe.budget import cost
from softmoe.budget.report import aligned
from softmoe.evaluate.mistakes import mistakes_section
from softmoe.report.runs import RunRecord, as_svg, comparison, router_health
from softmoe.storage.files import flatten

COLUMNS = ("run", "parameters", "MFLOP/image", "steps", "images", "TFLOP", "seconds", "top-1 %", "top-5 %", "loss")


def write_report(
    runs: list[RunRecord],
    path: Path,
    *,
    title: str | None = None,
    lead: tuple[str, ...] = (),
    figures: tuple[tuple[str, Any], ...] = (),
) -> Path:
    """Write the page; `figures` are (title, drawing) pairs to stand first. Names come from files: all are escaped."""
    template = files("softmoe.report").joinpath("page.html").read_text("utf-8")
    page = jinja2.Environment(autoescape=True).from_string(template)
    health = [(run.name, router_health(run)) for run in runs]
    text = page.render(
        title=title or "Runs: " + ", ".join(run.name for run in runs),
        lead=lead,
        names=[run.name for run in runs],
        summary=summary_table(runs),
        curves=as_svg(comparison(runs)),
        differences=differences(runs) if len(runs) > 1 else [],
        figures=[(name, as_svg(figure)) for name, figure in figures],
        health=[(name, as_svg(figure)) for name, figure in health if figure is not None],
        fewshot=fewshot_table(runs),
        mistakes=[(run.name, section) for run in runs if (section := mistakes_of(run))],
        inside=[(run.name, found) for run in runs if (found := inspection_figures(run))],
        folders=[(run.name, str(run.folder)) for run in runs],
        version=__version__,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def summary_table(runs: list[RunRecord]) -> list[tuple[str, ...]]:
    """Return a header and a line per run, as text."""
    lines: list[tuple[str, ...]] = [COLUMNS]
    for run in runs:
        price = cost(run.model)
        lines.append(
            (
                run.name,
                f"{price.params:,}",
                f"{price.forward_flops / 1e6:.1f}",
                number_cell(run.last("step"), ",.0f"),
                number_cell(run.last("images"), ",.0f"),
                number_cell(run.last("flops"), ",.1f", 1e-12),
                number_cell(run.last("device_seconds"), ",.0f"),
                number_cell(run.last("val/top1"), ".2f", 100),
                number_cell(run.last("val/top5"), ".2f", 100),
                number_cell(run.last("val/loss"), ".3f"),
            )
        )
    return lines


def number_cell(value: float | None, form: str, factor: float = 1.0) -> str:
    return "-" if value is None else format(value * factor, form)


def differences(runs: list[RunRecord]) -> list[tuple[str, ...]]:
    """List the settings in which the runs differ: a line per key, a column per run; a dash where it has no such key."""
    settings = [flatten(run.config.to_dict()) for run in runs]
    keys = dict.fromkeys(key for own in settings for key in own if key != "run_name")
    lines = [(key, *(own.get(key) for own in settings)) for key in keys]
    return [
        (key, *("-" if value is None else str(value) for value in values))
        for key, *values in lines
        if any(value != values[0] for value in values)
    ]


def table_text(lines: list[tuple[str, ...]]) -> str:
    """Format a table of text: the first column to the left, numbers to the right."""
    return "\n".join(aligned(lines))


def fewshot_table(runs: list[RunRecord]) -> list[tuple[str, ...]]:
    """Return a header and a line per run; a column per data set and number of shots. Empty if no run has any."""
    found = {run.name: accuracies(run.folder / "fewshot.json") for run in runs}
    columns = list(dict.fromkeys(column for numbers in found.values() for column in numbers))
    if not columns:
        return []
    lines = [tuple(f"{100 * numbers[c]:.2f}" if c in numbers else "-" for c in columns) for numbers in found.values()]
    header = ("run", *(f"{name}, {shots}-shot %" for name, shots in columns))
    return [header, *((name, *line) for name, line in zip(found, lines, strict=True))]


def accuracies(path: Path) -> dict[tuple[str, str], float]:
    """Read {(data set, shots): mean accuracy over the seeds}; empty where there is no such file, or it is another's."""
    try:
        by_data: dict[str, Any] = json.loads(path.read_text())["fewshot"]["accuracies"]
        return {(n, shots): sum(values) / len(values) for n, by in by_data.items() for shots, values in by.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        return {}


def mistakes_of(run: RunRecord) -> str:
    """Return the confusions, classes and worst images of a run from its evaluation.json; empty where there is none."""
    try:
        return mistakes_section(json.loads((run.folder / "evaluation.json").read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, jinja2.TemplateError):
        return ""


def inspection_figures(run: RunRecord) -> list[tuple[str, str]]:
    """List (name, data URI) of each PNG in the run's figures/."""
    paths = sorted((run.folder / "figures").glob("*.png"))
    return [
        (p.stem.replace("_", " "), f"data:image/png;base64,{base64.b64encode(p.read_bytes()).decode()}") for p in paths
    ]
