"""The cost columns of the paper's tables, and what our formulas say about them."""

from softmoe.budget.paper.compare import (
    MISFITS,
    Comparison,
    Misfit,
    compare_long_runs,
    compare_pareto_runs,
    exaflop,
    summary,
)
from softmoe.budget.paper.tables import (
    LongRun,
    ParetoRun,
    long_run_config,
    long_runs,
    pareto_arguments,
    pareto_config,
    pareto_runs,
    read_table,
)

__all__ = [
    "MISFITS",
    "Comparison",
    "LongRun",
    "Misfit",
    "ParetoRun",
    "compare_long_runs",
    "compare_pareto_runs",
    "exaflop",
    "long_run_config",
    "long_runs",
    "pareto_arguments",
    "pareto_config",
    "pareto_runs",
    "read_table",
    "summary",
]
