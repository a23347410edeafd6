"""Keep what jobs leave on disk: OUT/runs/<key>/result.json, written when a job is done, and read ever after."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from softmoe.storage.files import read_json, write_json
from softmoe.studies.jobs import Job, key_of
from softmoe.studies.lab import Cell
from softmoe.studies.results import Row, Table

SHOTS = 10
EXAMPLES = 2500
"""Training images of the transfer data that the shots are drawn from: more than twice as many as are needed."""


@dataclass(frozen=True)
class Store:
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
        """Do what is missing of a job, and keep it."""
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
    """Return the 10-shot accuracy in percent: the mean over three draws of ten images a class, the penalty chosen
    without the test images.
    """
    from softmoe.evaluate.api import fewshot

    report = fewshot(run, [data], shots=(SHOTS,), seeds=3, train_examples=EXAMPLES, test_examples=5000, cache=False)
    return 100.0 * report["fewshot"]["numbers"][f"{data}/{SHOTS}shot"]


def insert_after(numbers: dict[str, Any], key: str, name: str, value: float) -> dict[str, Any]:
    """Insert a number after another, for a readable order of columns."""
    pairs = list(numbers.items())
    place = next((i + 1 for i, (k, _) in enumerate(pairs) if k == key), len(pairs))
    return dict([*pairs[:place], (name, value), *pairs[place:]])
