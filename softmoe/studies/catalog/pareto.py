"""Which router gives the most quality for a training budget?

Models of several sizes, dense and with each router, by training FLOPs and time; the frontier of each router is drawn.
Controls that the paper does not have: one expert with all slots (what is above it is what experts give), slots that are
plain means (Uniform / Soft), unmixed tokens (Identity) and, where slots are fewer than tokens, dense with merged ones.

The paper (Figure 3, Table 9; 107 models from S/32 to H/14, 300,000 steps): Soft MoE is ahead of dense, Tokens Choice
and Experts Choice at any budget, in FLOPs and in time.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from softmoe.budget.paper import pareto_arguments, pareto_runs, read_table
from softmoe.studies.figures import NAMES, PAPER_QUALITY, ROUTING, frontier, label, legend, panels, pareto
from softmoe.studies.lab import Cell, Lab, wide
from softmoe.studies.results import GIVES, Claim, Table, paired
from softmoe.train import ModelSection

ROUTERS = ("soft", "dense", "tokens_choice", "experts_choice")
OURS = (*ROUTERS, "one", "uniform_soft", "identity", "merged")
COSTS = {"tflops": "training FLOPs", "time": "training time"}
PAPER_COLUMNS = {"top1": "jft_p_at_1", "10shot": "in_10shot"}
PAPER_COSTS = {"tflops": ("train_exaflop", "training exaFLOP"), "time": ("train_days", "TPUv3 days")}


def cells(lab: Lab) -> Iterator[Cell]:
    if lab.scale == "paper":
        yield from printed_models(lab)
        return
    own = lab.shape.width
    for width in lab.pick(tiny=(8, 16), small=(own // 2, own, 2 * own), paper=()):
        models = {router: lab.config(router, **wide(width)) for router in ROUTERS}
        for router, config in (lab.controls(**wide(width)) | models).items():
            yield from lab.over_seeds(config, router=router, model=f"width {width}")


def printed_models(lab: Lab) -> Iterator[Cell]:
    """Return the 107 models of the paper's table."""
    for run in pareto_runs():
        name, arguments = pareto_arguments(run)
        del arguments["num_classes"]
        config = replace(lab.base, model=ModelSection(name=name, options=arguments))
        yield from lab.over_seeds(config, router=ROUTING[run.routing], model=run.model, ref=run.ref)


def time_of(numbers: dict[str, float]) -> float:
    """Return the seconds of computing.

    Of a run with one thread they are the thread's own, which other work on the machine changes least.
    """
    return numbers.get("cpu_seconds") or numbers["seconds"]


def points(table: Table, router: str, cost: str, number: str, seed: int | None = None) -> list[tuple[float, float]]:
    """List (cost, quality) of each model, means over the seeds (or of one seed), by rising cost."""
    found = []
    rows = table.where(router=router)
    for place in dict.fromkeys(tuple(row.labels.items()) for row in rows):
        same = [row.numbers for row in rows if tuple(row.labels.items()) == place and seed in (None, row.seed)]
        costs = [time_of(n) if cost == "time" else n[cost] for n in same]
        if same and all(number in n for n in same):
            found.append((float(np.mean(costs)), float(np.mean([n[number] for n in same]))))
    return sorted(found)


def lead(table: Table, other: str, cost: str, number: str) -> dict[int, float]:
    """Return by seed how far Soft MoE is above the other router's models at their cost, on the mean.

    Soft MoE between its own models is a straight line over the logarithm of the cost; models outside of its range are
    left out, so nothing is extrapolated. Costs are means over the seeds: of time only the noise differs.
    """
    leads: dict[int, float] = {}
    for seed in sorted({row.seed for row in table}):
        soft = with_mean_costs(table, "soft", cost, number, seed)
        rest = with_mean_costs(table, other, cost, number, seed)
        gap = mean_gap(soft, rest)
        if gap is not None:
            leads[seed] = gap
    return leads


def mean_gap(line: list[tuple[float, float]], others: list[tuple[float, float]]) -> float | None:
    """Return how far a line through points (cost, quality) lies above other points on the mean.

    Points outside of the line's range of costs do not count.
    """
    if len(line) < 2:
        return None
    costs, quality = np.log([c for c, _ in line]), [q for _, q in line]
    gaps = [np.interp(np.log(c), costs, quality) - q for c, q in others if line[0][0] <= c <= line[-1][0]]
    return float(np.mean(gaps)) if gaps else None


def with_mean_costs(table: Table, router: str, cost: str, number: str, seed: int) -> list[tuple[float, float]]:
    of_seed = Table(tuple(row for row in table if row.seed == seed))
    costs, found = points(table, router, cost, number), points(of_seed, router, cost, number)
    return [(c, q) for (c, _), (_, q) in zip(costs, found, strict=True)] if len(costs) == len(found) else []


def claims(table: Table) -> Iterator[Claim]:
    for cost, words in COSTS.items():
        for other in OURS[1:]:
            for number in (*table.quality, "val_loss"):
                leads = lead(table, other, cost, number)
                if number == "val_loss":
                    leads = {seed: -value for seed, value in leads.items()}
                if not leads:  # no costs in common
                    continue
                text = f"Soft MoE is better than {NAMES[other]} at equal {words}: {number}"
                text = f"{GIVES[other]}: {text}" if other in GIVES else text
                unit = "nats lower" if number == "val_loss" else "points"
                yield Claim(text, paired(leads, dict.fromkeys(leads, 0.0)), printed_lead(other, cost, number), unit)


def printed_lead(other: str, cost: str, number: str) -> str:
    """Return the lead that the paper's table gives."""
    if number not in PAPER_COLUMNS or other not in ROUTERS:
        return ""
    soft, rest = printed("soft", cost, number), printed(other, cost, number)
    gap = mean_gap(frontier(soft), frontier(rest))
    return "" if gap is None else f"{gap:+.1f} points"


def printed(router: str, cost: str, number: str) -> list[tuple[float, float]]:
    """List (cost, quality) of the paper's models."""
    rows = [row for row in read_table("pareto_runs") if ROUTING[row["routing"]] == router]
    return [(float(row[PAPER_COSTS[cost][0]]), float(row[PAPER_COLUMNS[number]])) for row in rows]


def figure(table: Table, lab: Lab) -> Any:
    numbers = table.quality
    drawing, axes = panels(2 * len(numbers), 2)
    for index, number in enumerate(numbers):
        for column, cost in enumerate(COSTS):
            above, below = axes[2 * index][column], axes[2 * index + 1][column]
            theirs = {router: printed(router, cost, number) for router in ROUTERS}
            pareto(above, theirs, f"paper: {PAPER_COSTS[cost][1]}", PAPER_QUALITY[number])
            ours = {router: found for router in OURS if (found := points(table, router, cost, number))}
            x_label = "ours: training TFLOPs" if cost == "tflops" else "ours: seconds on one core"
            pareto(below, ours, x_label, label(number))
    legend(axes[1][0])
    return drawing
