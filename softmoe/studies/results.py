"""The table of a study: a row per run, with what it was (labels), its seed, and what came out (numbers)."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from softmoe.studies.statistics import Interval, interval, paired

QUALITY = {"top1": "validation top-1 (%)", "10shot": "10-shot transfer (%)"}
"""The paper's two measures: precision upstream, and 10-shot accuracy on other classes. Both in percent."""


@dataclass(frozen=True)
class Row:
    labels: dict[str, Any]
    seed: int
    numbers: dict[str, float]
    folder: Path = field(default=Path(), compare=False)


@dataclass(frozen=True)
class Table:
    """The finished runs of a study, in the order of its plan."""

    rows: tuple[Row, ...]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, **labels: Any) -> "Table":
        """The rows with these labels; a tuple of values means any of them."""

        def fits(row: Row, key: str, wanted: Any) -> bool:
            found = row.labels.get(key)
            return found in wanted if isinstance(wanted, tuple) and not isinstance(found, tuple) else found == wanted

        return Table(tuple(row for row in self.rows if all(fits(row, k, v) for k, v in labels.items())))

    def distinct(self, label: str) -> list[Any]:
        """The values of a label, in the order of the plan."""
        return list(dict.fromkeys(row.labels[label] for row in self.rows if label in row.labels))

    @property
    def quality(self) -> list[str]:
        """Which of the paper's two measures there are."""
        return [name for name in QUALITY if any(name in row.numbers for row in self.rows)]

    def values(self, number: str) -> dict[int, float]:
        """By seed; where a seed has several rows, their mean."""
        found: dict[int, list[float]] = {}
        for row in self.rows:
            if row.numbers.get(number) is not None:
                found.setdefault(row.seed, []).append(row.numbers[number])
        return {seed: fmean(values) for seed, values in found.items()}

    def interval(self, number: str) -> Interval | None:
        return interval(list(self.values(number).values()))

    def mean(self, number: str) -> float | None:
        values = self.values(number)
        return fmean(values.values()) if values else None

    def minus(self, other: "Table", number: str) -> Interval | None:
        """Mean difference, seed by seed."""
        return paired(self.values(number), other.values(number))

    def to_csv(self) -> str:
        labels = list(dict.fromkeys(key for row in self.rows for key in row.labels))
        numbers = list(dict.fromkeys(key for row in self.rows for key in row.numbers))
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*labels, "seed", *numbers, "run"])
        for row in self.rows:
            cells = [show(row.labels.get(key)) for key in labels], [show(row.numbers.get(key)) for key in numbers]
            writer.writerow([*cells[0], row.seed, *cells[1], row.folder.name])
        return text.getvalue()


def show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return " ".join(map(str, value)) if isinstance(value, tuple) else "" if value is None else str(value)


def join(tables: Iterable[Table]) -> Table:
    return Table(tuple(row for table in tables for row in table))


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    head, *body = lines
    rows = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
