"""The table of a study: a row per run, with what it was (labels), its seed, and what came out (numbers).

Differences are means over seeds with confidence intervals by Student's t distribution.
"""

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from softmoe.storage.files import write_json, write_text

QUALITY = {"top1": "validation top-1 (%)", "10shot": "10-shot transfer (%)"}
"""The paper's two measures: precision upstream, and 10-shot accuracy on other classes. Both in percent."""
LEVEL = 0.95
NAMES = {
    "soft": "Soft MoE",
    "dense": "dense",
    "dense more": "dense, more steps",
    "merged": "dense, tokens merged",
    "tokens_choice": "Tokens Choice",
    "experts_choice": "Experts Choice",
    "soft_uniform": "Soft / Uniform",
    "uniform_soft": "Uniform / Soft",
    "uniform": "Uniform",
    "identity": "Identity",
    "one": "one expert, as many slots",
    "placed": "Soft MoE with a place",
    "placed one": "one expert with a place",
}
GIVES = {
    "one": "what experts give",
    "uniform_soft": "what learned dispatch gives",
    "identity": "what mixing gives",
    "merged": "what it gives above merged tokens",
    "dense": "all of it",
}
"""The controls of Soft MoE, and what the difference to each of them is."""


@dataclass(frozen=True)
class Interval:
    """A mean over `count` seeds and how far it may lie from the truth: infinitely far for one seed; count 0: exact."""

    mean: float
    half: float
    count: int

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    def __str__(self) -> str:
        """Write mean and interval with three digits of the larger of the two."""
        largest = max(abs(self.mean), self.half if self.count > 1 else 0.0)
        digits = max(0, 2 - math.floor(math.log10(largest))) if largest else 0
        mean = f"{self.mean:+.{digits}f}"
        return (
            f"{mean} ({('by formula', 'one seed')[self.count]})"
            if self.count < 2
            else f"{mean} ± {self.half:.{digits}f}"
        )


@dataclass(frozen=True)
class Row:
    """One finished run."""

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
        """Return the rows with these labels; a tuple of values means any of them."""

        def fits(row: Row, key: str, wanted: Any) -> bool:
            found = row.labels.get(key)
            return found in wanted if isinstance(wanted, tuple) and not isinstance(found, tuple) else found == wanted

        return Table(tuple(row for row in self.rows if all(fits(row, k, v) for k, v in labels.items())))

    def distinct(self, label: str) -> list[Any]:
        """Return the values of a label, in the order of the plan."""
        return list(dict.fromkeys(row.labels[label] for row in self.rows if label in row.labels))

    @property
    def quality(self) -> list[str]:
        """The measures of the paper's two that some row has."""
        return [name for name in QUALITY if any(name in row.numbers for row in self.rows)]

    def values(self, number: str) -> dict[int, float]:
        """Return a number by seed; where a seed has several rows, their mean."""
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

    def gains(self, other: "Table", number: str) -> dict[int, float]:
        """Return the differences by seed: equal seeds saw the same images in the same order."""
        a, b = self.values(number), other.values(number)
        return {seed: a[seed] - b[seed] for seed in a if seed in b}

    def minus(self, other: "Table", number: str) -> Interval | None:
        """Return the mean difference, seed by seed."""
        return interval(list(self.gains(other, number).values()))

    def to_csv(self) -> str:
        labels = list(dict.fromkeys(key for row in self.rows for key in row.labels))
        numbers = list(dict.fromkeys(key for row in self.rows for key in row.numbers))
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*labels, "seed", *numbers, "run"])
        for row in self.rows:
            cells = (
                [csv_cell(row.labels.get(key)) for key in labels],
                [csv_cell(row.numbers.get(key)) for key in numbers],
            )
            writer.writerow([*cells[0], row.seed, *cells[1], row.folder.name])
        return text.getvalue()


def csv_cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return " ".join(map(str, value)) if isinstance(value, tuple) else "" if value is None else str(value)


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """Format lines of cells, the first of them the header, as a Markdown table."""
    head, *body = lines
    rows = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def interval(values: Sequence[float], level: float = LEVEL) -> Interval | None:
    """Return the confidence interval of the mean of independent values; None if there is no value."""
    count = len(values)
    if count < 2:
        return Interval(values[0], math.inf, 1) if count else None
    return Interval(fmean(values), t_quantile(0.5 + level / 2, count - 1) * stdev(values) / math.sqrt(count), count)


def exact(value: float) -> Interval:
    """Return the interval of what a formula says: a point."""
    return Interval(value, 0.0, 0)


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> Interval | None:
    """Return the interval of a - b over the seeds that both have: equal seeds saw the same images in the same order."""
    return interval([a[seed] - b[seed] for seed in a if seed in b])


def t_quantile(probability: float, freedom: int) -> float:
    """Return the value below which a t variable of `freedom` degrees lies with this probability, 0.5 at least."""
    if not 0.5 <= probability < 1.0 or freedom < 1:
        raise ValueError(f"expected a probability in [0.5, 1) and freedom of 1 at least, got {probability}, {freedom}")
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _below(middle, freedom) < probability else (low, middle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _below(angle: float, freedom: int) -> float:
    """Return P(T < t) for t = sqrt(freedom) tan(angle), where the density is cos(angle) ** (freedom - 1) / a constant.

    Its integral is done by parts, two powers at a time, down to that of 1 or of the cosine.
    """
    whole = 1.0 if freedom % 2 == 0 else math.pi / 2  # integral from 0 to pi / 2 of the lowest power
    part = math.sin(angle) if freedom % 2 == 0 else angle
    for power in range(2 + (freedom % 2 == 0), freedom, 2):
        part = math.cos(angle) ** (power - 1) * math.sin(angle) / power + (power - 1) / power * part
        whole *= (power - 1) / power
    return 0.5 + 0.5 * part / whole


Word = Literal["confirmed", "not confirmed at this size", "opposite", "not run"]


@dataclass(frozen=True)
class Claim:
    """A sentence that is true where `found` lies above zero.

    `paper` is the paper's own number or words; `unit` is of both.
    """

    text: str
    found: Interval | None
    paper: str
    unit: str = "points"

    @property
    def word(self) -> Word:
        if self.found is None or math.isnan(self.found.mean):
            return "not run"
        if self.found.low > 0:
            return "confirmed"
        return "opposite" if self.found.high < 0 else "not confirmed at this size"

    def to_dict(self) -> dict:
        f = self.found
        half = None if f is None or math.isinf(f.half) else f.half
        numbers = None if f is None else {"mean": f.mean, "half": half, "seeds": f.count}
        return {"claim": self.text, "paper": self.paper, "unit": self.unit, "found": numbers, "verdict": self.word}


def better(better_one: Table, other: Table, text: str, paper: dict[str, str] | None = None) -> Iterator[Claim]:
    """Yield the claim that the first is better: by the paper's measures, and by the loss, which is the least noisy."""
    for number in better_one.quality:
        found = better_one.minus(other, number)
        yield Claim(f"{text}: {QUALITY[number].removesuffix(' (%)')}", found, (paper or {}).get(number, ""))
    yield Claim(f"{text}: validation loss", other.minus(better_one, "val_loss"), "", "nats lower")


def beside_controls(soft: Table, control: Callable[[str], Table]) -> Iterator[Claim]:
    """Yield what Soft MoE has above each of its controls that there is, and what slots give: one expert above dense."""
    for method, what in GIVES.items():
        if len(rows := control(method)):
            yield from better(soft, rows, f"{what}: {NAMES['soft']} is better than {NAMES[method]}")
    if len(one := control("one")) and len(dense := control("dense")):
        yield from better(one, dense, f"what slots give: {NAMES['one']} is better than {NAMES['dense']}")


def costs(table: Table, label: str = "method", unit: str = "soft") -> str:
    """Return a table of every method: its means, and its training FLOPs and processor time, those of `unit` being 1."""
    shares = {"tflops": "FLOPs", "cpu_seconds": "processor time"}
    measures = {name: QUALITY[name] for name in table.quality} | {"val_loss": "validation loss"} | shares
    lines = [["", *measures.values()]]
    for method in table.distinct(label):
        cells = [str(NAMES.get(method, method))]
        for name in measures:
            mean = table.where(**{label: method}).mean(name)
            by = table.where(**{label: unit}).mean(name) if name in shares else 1.0
            cells.append(f"{mean / by:.2f}" if mean is not None and by else "-")
        lines.append(cells)
    return markdown_table(lines)


def write_verdict(folder: Path, title: str, story: str, claims: list[Claim], notes: list[str]) -> list[Path]:
    """Write verdict.md for people and verdict.json for programs."""
    lines = [("claim", "paper", "ours: mean difference, 95 % interval", "verdict")]
    for claim in claims:
        found = claim.found
        seeds = f", {found.count} seeds" if found is not None and found.count > 1 else ""
        ours = "-" if found is None else f"{found} {claim.unit}{seeds}"
        lines.append((claim.text, claim.paper or "-", ours, claim.word))
    text = "\n\n".join([f"# {title}", story, markdown_table(lines), *notes]) + "\n"
    values = {"study": title, "claims": [claim.to_dict() for claim in claims], "notes": notes}
    return [write_text(folder / "verdict.md", text), write_json(folder / "verdict.json", values)]
