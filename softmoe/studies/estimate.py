"""What a study would cost, before it runs."""

from dataclasses import dataclass
from types import ModuleType

from softmoe.studies.driver import name_of, unfinished
from softmoe.studies.lab import Lab
from softmoe.studies.store import Store

SHARE = 0.2  # of the machine's rate of products that we expect training to reach, where nothing was measured


@dataclass(frozen=True)
class Estimate:
    study: str
    cells: int
    jobs: int
    """To be done."""
    flops: float
    rate: float
    measured: bool

    def __str__(self) -> str:
        how = "as finished runs had here" if self.measured else f"assumed: {SHARE:.0%} of this machine's peak"
        return (
            f"{self.study}: {self.cells} cells, {self.jobs} jobs to do, {self.flops:.3g} FLOPs, "
            f"about {duration(self.flops / self.rate)} one after another ({self.rate:.3g} FLOP/s, {how})"
        )


def estimate(study: ModuleType, lab: Lab, store: Store) -> Estimate:
    cells = list(study.cells(lab))
    pending = unfinished(cells, store)
    rate = measured_rate(store, lab, cells)
    return Estimate(
        name_of(study), len(cells), len(pending), sum(job.flops() for job in pending), rate or assumed(), bool(rate)
    )


def measured_rate(store: Store, lab: Lab, cells: list) -> float | None:
    """FLOPs a second of the finished runs among the cells."""
    rows = [row.numbers for row in store.table(cells) if row.numbers.get("seconds")]
    return sum(r["tflops"] * 1e12 for r in rows) / sum(r["seconds"] for r in rows) if rows else None


def assumed() -> float:
    import torch

    from softmoe.train.log import peak_flops

    return SHARE * peak_flops(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def duration(seconds: float) -> str:
    for unit, size in (("years", 31_557_600), ("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.0f} seconds"
