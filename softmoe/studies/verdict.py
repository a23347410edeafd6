"""Judge what a study found: claims of the paper, each with our interval and one of three words."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from softmoe.storage.files import write_json, write_text
from softmoe.studies.results import QUALITY, Interval, Table, markdown_table

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


def larger(larger_one: Table, other: Table, number: str, text: str, paper: str, unit: str) -> Claim:
    return Claim(text, larger_one.minus(other, number), paper, unit)


def seeds(found: Interval) -> str:
    return f", {found.count} seeds" if found.count > 1 else ""


def write_verdict(folder: Path, title: str, story: str, claims: list[Claim], notes: list[str]) -> list[Path]:
    """Write verdict.md for people and verdict.json for programs."""
    lines = [("claim of the paper", "paper", "ours: mean difference, 95 % interval", "verdict")]
    for claim in claims:
        ours = "-" if claim.found is None else f"{claim.found} {claim.unit}{seeds(claim.found)}"
        lines.append((claim.text, claim.paper or "-", ours, claim.word))
    text = "\n\n".join([f"# {title}", story, markdown_table(lines), *notes]) + "\n"
    values = {"study": title, "claims": [claim.to_dict() for claim in claims], "notes": notes}
    return [
        write_text(folder / "verdict.md", text),
        write_json(folder / "verdict.json", values),
    ]
