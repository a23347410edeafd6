"""What other commands left in a run's folder: few-shot accuracy and inspection figures.

softmoe fewshot RUN DATA --output RUN/fewshot.json
softmoe inspect RUN DATA
"""

import base64
import json
from pathlib import Path
from typing import Any

from softmoe.report.runs import RunRecord


def fewshot_table(runs: list[RunRecord]) -> list[tuple[str, ...]]:
    """A header and a line per run; a column per data set and number of shots. Empty if no run has any."""
    found = {run.name: accuracies(run.folder / "fewshot.json") for run in runs}
    columns = list(dict.fromkeys(column for numbers in found.values() for column in numbers))
    if not columns:
        return []
    lines = [tuple(f"{100 * numbers[c]:.2f}" if c in numbers else "-" for c in columns) for numbers in found.values()]
    header = ("run", *(f"{name}, {shots}-shot %" for name, shots in columns))
    return [header, *((name, *line) for name, line in zip(found, lines, strict=True))]


def accuracies(path: Path) -> dict[tuple[str, str], float]:
    """{(data set, shots): mean accuracy over the seeds}; empty where there is no such file, or it is another's."""
    try:
        by_data: dict[str, Any] = json.loads(path.read_text())["fewshot"]["accuracies"]
        return {(n, shots): sum(values) / len(values) for n, by in by_data.items() for shots, values in by.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        return {}


def inspection_figures(run: RunRecord) -> list[tuple[str, str]]:
    """(name, data URI) of each PNG in the run's figures/."""
    paths = sorted((run.folder / "figures").glob("*.png"))
    return [
        (p.stem.replace("_", " "), f"data:image/png;base64,{base64.b64encode(p.read_bytes()).decode()}") for p in paths
    ]
