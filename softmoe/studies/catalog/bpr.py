"""Does it help to serve the tokens with the largest gates first?

Tokens Choice with and without Batch Priority Routing, for one and two experts a token (with two, buffers of twice the
size, as in the paper's runs).

The paper (Table 8; S/16, 32 and 64 experts): yes, above all with one expert a token: +4.4 and +4.7 points of 10-shot
accuracy, against +0.4 and +0.5 with two.
"""

from collections.abc import Iterator
from typing import Any

from softmoe.budget.paper import read_table
from softmoe.studies.figures import curve, finish, label, legend, panels
from softmoe.studies.lab import Cell, Lab
from softmoe.studies.results import Claim, Table, better

COLUMNS = {"top1": "jft_p_at_1_pct", "10shot": "in_10shot_pct"}


def cells(lab: Lab) -> Iterator[Cell]:
    for experts in lab.pick(tiny=(4,), small=(16,), paper=(32, 64)):
        for k in (1, 2):
            for priority in (True, False):
                config = lab.config(
                    "tokens_choice", num_experts=experts, top_k=k, capacity_factor=float(k), batch_priority=priority
                )
                yield from lab.over_seeds(config, experts=experts, k=k, priority=priority)


def claims(table: Table) -> Iterator[Claim]:
    for k in (1, 2):
        gains = {n: f"+{min(gain(k, n)):.1f} to +{max(gain(k, n)):.1f} points" for n in COLUMNS}
        on, off = (table.where(k=k, priority=priority) for priority in (True, False))
        yield from better(on, off, f"batch priority helps with K = {k}", gains)
        yield Claim(f"batch priority drops fewer tokens with K = {k}", off.minus(on, "drop_rate"), "yes", "of tokens")


def gain(k: int, number: str) -> list[float]:
    """Return what batch priority adds in the paper, for each number of experts."""
    rows = [row for row in read_table("bpr") if int(row["k"]) == k]
    with_it, without = ([float(r[COLUMNS[number]]) for r in rows if r["bpr"] == said] for said in ("Yes", "No"))
    return [a - b for a, b in zip(with_it, without, strict=True)]


def figure(table: Table, lab: Lab) -> Any:
    numbers = table.quality
    drawing, axes = panels(2, len(numbers), height=3.0)
    for column, number in enumerate(numbers):
        above, below = axes[0][column], axes[1][column]
        for experts in ("32", "64"):
            rows = [row for row in read_table("bpr") if row["experts"] == experts]
            for said, shade in (("Yes", 1.0), ("No", 0.45)):
                ys = [float(row[COLUMNS[number]]) for row in rows if row["bpr"] == said]
                style = {"color": "#3f9455" if experts == "64" else "#888888", "alpha": shade, "marker": "o"}
                above.plot([1, 2], ys, label=f"{experts} experts, {'with' if said == 'Yes' else 'without'}", **style)
        for priority, shade in ((True, 1.0), (False, 0.45)):
            for experts in table.distinct("experts"):
                found = [table.where(k=k, priority=priority, experts=experts).interval(number) for k in (1, 2)]
                done = [(k, i) for k, i in zip((1, 2), found, strict=True) if i is not None]
                name = f"{experts} experts, {'with' if priority else 'without'}"
                curve(below, done, color="#3f9455", alpha=shade, label=name)
        finish(above, "experts a token (K), paper, S/16", label(number, paper=True))
        finish(below, "experts a token (K), ours", label(number))
        for axis in (above, below):
            axis.set_xticks([1, 2])
            legend(axis, "batch priority")
    return drawing
