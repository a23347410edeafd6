"""Compare our formulas with the paper's cost columns.

GFLOP/img is one forward pass, elementwise operations included. Train exaFLOP is half of the FLOPs of the train step
(the likeliest reason: FLOPs per core were multiplied by chips, which have two) plus the optimizer step, which every
device does for all parameters that it holds:

    exaFLOP = steps * (4096 / 2 * train FLOPs per image + 25 * devices * parameters per device) / 1e18

25 FLOPs per parameter is XLA's count of clipping, Adam, decay and global norms. The number of devices is not in the
paper: it was inferred from the residuals, and moves the result by under 0.5 %.
"""

from dataclasses import dataclass
from statistics import median

from softmoe.budget.count import cost
from softmoe.budget.paper.misfits import LARGE, Misfit, misfit_of
from softmoe.budget.paper.tables import (
    BATCH,
    PARETO_STEPS,
    LongRun,
    ParetoRun,
    long_run_config,
    long_runs,
    pareto_config,
    pareto_runs,
)
from softmoe.models import ViTConfig

OPTIMIZER_FLOPS = 25
DEVICES = {32: 128, 16: 256, 8: 256, 14: 512}  # by patch size


@dataclass(frozen=True)
class Comparison:
    """`error` is (ours - paper) / paper of the exaFLOP column, `gflop_error` that of GFLOP/img (long runs only)."""

    run: LongRun | ParetoRun
    params: int
    gflop: float
    exaflop: float
    misfit: Misfit | None = None

    @property
    def error(self) -> float:
        return self.exaflop / self.run.exaflop - 1.0

    @property
    def gflop_error(self) -> float | None:
        return self.gflop / self.run.gflop - 1.0 if isinstance(self.run, LongRun) else None


def exaflop(config: ViTConfig, steps: int) -> float:
    """Return the paper's Train exaFLOP of `steps` steps of 4,096 images."""
    c = cost(config, convention="paper")
    experts = c.parts["experts"].params
    on_one_device = c.params - experts + (experts // config.moe.num_experts if config.moe else 0)
    optimizer = OPTIMIZER_FLOPS * DEVICES[config.patch_size] * on_one_device
    return steps * (BATCH / 2 * c.train_flops + optimizer) / 1e18


def compare_long_runs() -> list[Comparison]:
    return [compare(run, long_run_config(run), run.steps) for run in long_runs()]


def compare_pareto_runs() -> list[Comparison]:
    return [compare(run, pareto_config(run), PARETO_STEPS) for run in pareto_runs()]


def compare(run: LongRun | ParetoRun, config: ViTConfig, steps: int) -> Comparison:
    c = cost(config, convention="paper")
    misfit = misfit_of(run.ref) if isinstance(run, ParetoRun) else None
    return Comparison(run, c.params, c.forward_flops / 1e9, exaflop(config, steps), misfit)


def summary(rows: list[Comparison], *, without_large_misfits: bool = False) -> dict[str, tuple[int, float, float]]:
    """Return for each routing the number of rows, median and largest absolute error of the exaFLOP column."""
    errors: dict[str, list[float]] = {}
    for row in rows:
        if without_large_misfits and isinstance(row.run, ParetoRun) and row.run.ref in LARGE:
            continue
        errors.setdefault(row.run.routing, []).append(abs(row.error))
    return {routing: (len(e), median(e), max(e)) for routing, e in errors.items()}
