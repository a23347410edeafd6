"""Which part of Soft MoE's routing matters?

The same transformer with learned, fixed or no mixing: Soft MoE, one of dispatch and combine uniform, both uniform,
tokens sent round the experts unmixed (Identity), and no experts at all. As many experts and slots as tokens. Controls
that the paper does not have: one expert with all slots, and a dense model with a fifth more FLOPs than Soft MoE.

The paper (Table 2, Appendix A; S/14, 256 experts): Soft MoE first by far; dispatch matters a little more than combine;
Uniform and Identity far behind, but ahead of the dense model.
"""

from collections.abc import Iterator
from typing import Any

from softmoe.budget.paper import read_table
from softmoe.studies.figures import NAMES, bars, finish, label, panels
from softmoe.studies.lab import Cell, Lab
from softmoe.studies.results import Claim, Table, beside_controls, better, costs, exact

METHODS = ("soft", "soft_uniform", "uniform_soft", "uniform", "identity", "dense")  # in the order of the paper's table
OURS = (*METHODS, "one", "dense more", "merged")
COLUMNS = {"top1": "jft_p_at_1_pct", "10shot": "in_10shot_pct"}
CLAIMS = (
    ("soft", "dense"),
    ("soft", "soft_uniform"),
    ("soft", "uniform_soft"),
    ("soft", "uniform"),
    ("soft", "identity"),
    ("soft_uniform", "uniform_soft"),
    ("uniform", "dense"),
    ("identity", "dense"),
)


def cells(lab: Lab) -> Iterator[Cell]:
    for method in METHODS:
        yield from lab.over_seeds(lab.config(method), method=method)
    for method, config in lab.controls().items():
        if method not in METHODS[:-1]:
            yield from lab.over_seeds(config, method="dense more" if method == "dense" else method)


def claims(table: Table) -> Iterator[Claim]:
    paper = printed()
    for first, second in CLAIMS:
        gap = {number: f"+{paper[number][first] - paper[number][second]:.1f} points" for number in COLUMNS}
        text = f"{NAMES[first]} is better than {NAMES[second]}"
        yield from better(table.where(method=first), table.where(method=second), text, gap)
    names = {"one": "one", "dense": "dense more", "merged": "merged"}
    yield from beside_controls(table.where(method="soft"), lambda method: table.where(method=names.get(method)))


def notes(table: Table) -> list[str]:
    return ["Means; FLOPs and processor time as shares of Soft MoE's:", costs(table)]


def printed() -> dict[str, dict[str, float]]:
    """Return {measure: {method: the paper's number}}; its rows stand in the order of METHODS."""
    rows = read_table("ablations")
    return {
        number: {method: float(row[column]) for method, row in zip(METHODS, rows, strict=True)}
        for number, column in COLUMNS.items()
    }


def figure(table: Table, lab: Lab) -> Any:
    numbers = table.quality
    drawing, axes = panels(2, len(numbers))
    for column, number in enumerate(numbers):
        theirs = printed()[number]
        bars(axes[0][column], [(NAMES[m], exact(theirs[m])) for m in METHODS], "#888888")
        finish(axes[0][column], f"paper, S/14:\n{label(number, paper=True)}", "")
        ours = [(NAMES[m], i) for m in OURS if (i := table.where(method=m).interval(number)) is not None]
        bars(axes[1][column], ours, "#3b6fb6")
        finish(axes[1][column], f"ours, 95 % interval:\n{label(number)}", "")
    return drawing
