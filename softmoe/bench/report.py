"""Rows of timings as a table on the screen and as JSON."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from softmoe.bench.cases import Row
from softmoe.bench.roofline import Roofline, as_json


def table(rows: Iterable[Row]) -> Iterable[str]:
    """Lines, case by case; each time also as a multiple of the case's first row (above 1: slower than it)."""
    for (case, phase), group in groupby(rows, key=lambda row: (row.case, row.phase)):
        members = list(group)
        yield f"{case}, {phase}"
        for row in members:
            ratio = row.timing.median / members[0].timing.median
            share = "     " if row.roofline is None else f"{row.roofline:5.2f}"
            yield (
                f"  {row.name:<24} {1e3 * row.timing.median:9.2f} ms  ± {100 * row.timing.spread:4.1f} %"
                f"   {ratio:6.2f} x   roofline {share}"
            )


def save(rows: list[Row], roofline: Roofline, path: Path) -> None:
    path.write_text(json.dumps({"machine": as_json(roofline), "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
