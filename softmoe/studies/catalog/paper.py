"""What do the paper's own tables say, and do our formulas give the same costs?

Nothing is trained: the tables are part of the package. Every model of the two cost tables is described to our cost
model, and its columns are drawn and listed beside the printed ones.

The paper (Figure 3, Tables 1, 7 and 9): 107 models on the Pareto figure, 25 rows of long runs.
"""

from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np

from softmoe.budget.paper import LARGE, Comparison, ParetoRun, compare_long_runs, compare_pareto_runs, read_table
from softmoe.studies.catalog.pareto import PAPER_COSTS, ROUTERS, printed
from softmoe.studies.figures import COLORS, PAPER_QUALITY, ROUTING, finish, legend, panels, pareto
from softmoe.studies.lab import Cell, Lab
from softmoe.studies.results import Claim, Row, Table, exact, markdown_table

TABLES = ("ablations", "bpr", "placement_soft", "placement_tokens_choice", "placement_experts_choice", "lit")


def cells(lab: Lab) -> Iterator[Cell]:
    yield from ()


def rows(lab: Lab) -> Iterator[Row]:
    """Return a row per model of the cost tables, the printed cost beside ours."""
    quality = {int(row["ref"]): row for row in read_table("pareto_runs")}
    for found in compare_pareto_runs():
        assert isinstance(found.run, ParetoRun)
        row = quality[found.run.ref]
        numbers = {name: float(row[name]) for name in ("jft_p_at_1", "in_10shot", "train_days")}
        yield Row(labels(found, f"Table 9, {found.run.ref}"), 0, numbers | costs(found))
    for index, found in enumerate(compare_long_runs()):
        yield Row(labels(found, f"long runs, {index + 1}"), 0, costs(found))


def labels(found: Comparison, where: str) -> dict[str, Any]:
    run = found.run
    return {"where": where, "model": run.model, "routing": run.routing, "experts": run.experts}


def costs(found: Comparison) -> dict[str, float]:
    return {
        "params": float(found.params),
        "gflop": found.gflop,
        "exaflop_printed": found.run.exaflop,
        "exaflop_ours": found.exaflop,
        "error_pct": 100.0 * found.error,
    }


def claims(table: Table) -> Iterator[Claim]:
    long = [abs(row.numbers["error_pct"]) for row in table if row.labels["where"].startswith("long")]
    large = {f"Table 9, {ref}" for ref in LARGE}
    fitted = [row for row in table if row.labels["where"].startswith("Table 9") and row.labels["where"] not in large]
    errors = [abs(row.numbers["error_pct"]) for row in fitted]
    yield Claim(
        "our exaFLOP of the long runs are the printed ones within 0.1 %", exact(0.1 - max(long)), "", "% to spare"
    )
    text = f"and of {len(fitted)} of the 107 Pareto models within 1.3 %"
    yield Claim(text, exact(1.3 - max(errors)), f"median {median(errors):.2f} %", "% to spare")


def notes(table: Table) -> list[str]:
    """Return all tables of the paper; those with costs have ours beside."""
    cost_columns = ("params", "gflop", "exaflop_printed", "exaflop_ours", "error_pct")
    head = ["where", "model", "routing", "experts", "10-shot", "days", *cost_columns]
    lines = [head]
    for row in table:
        shot, days = (row.numbers.get(name) for name in ("in_10shot", "train_days"))
        names = [str(row.labels[name] or "") for name in head[:4]]
        lines.append([*names, *(f"{v:.4g}" if v is not None else "" for v in (shot, days))])
        lines[-1] += [f"{row.numbers[name]:.4g}" for name in cost_columns]
    found = [f"## Costs, printed and ours\n\n{markdown_table(lines)}"]
    for name in TABLES:
        printed_rows = read_table(name)
        body = [list(printed_rows[0]), *(list(row.values()) for row in printed_rows)]
        found.append(f"## {name}\n\n{markdown_table(body)}")
    return found


def figure(table: Table, lab: Lab) -> Any:
    """Draw Figure 3 as printed, and our cost of each model against the printed one."""
    drawing, axes = panels(2, 3, width=4.6)
    for line, number in zip(axes, PAPER_QUALITY, strict=True):
        for axis, cost in zip(line, PAPER_COSTS, strict=False):
            theirs = {router: printed(router, cost, number) for router in ROUTERS}
            pareto(axis, theirs, f"paper: {PAPER_COSTS[cost][1]}", PAPER_QUALITY[number])
    legend(axes[0][0])
    ours, errors = axes[0][2], axes[1][2]
    for router in ROUTERS:
        rows_ = [row.numbers for row in table if ROUTING[row.labels["routing"]] == router]
        xs, ys = [n["exaflop_printed"] for n in rows_], [n["exaflop_ours"] for n in rows_]
        ours.plot(xs, ys, "o", ms=4, color=COLORS[router], alpha=0.6)
        errors.plot(xs, [n["error_pct"] for n in rows_], "o", ms=4, color=COLORS[router], alpha=0.6)
    limits = np.array(ours.get_xlim())
    ours.plot(limits, limits, color="#888", lw=1)
    ours.set(xscale="log", yscale="log")
    errors.set(xscale="log", yscale="symlog")
    finish(ours, "exaFLOP, printed", "exaFLOP, our formula")
    finish(errors, "exaFLOP, printed", "error of our formula (%)")
    return drawing
