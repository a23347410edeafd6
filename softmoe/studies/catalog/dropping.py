"""How many tokens do sparse routers drop, and what does it cost?

Experts Choice and Tokens Choice with a growing number of experts, buffers for exactly as many rows as tokens (C = 1) or
an eighth more (C = 1.125), and Tokens Choice without batch priority. Soft MoE drops nothing by construction.

The paper (Appendix B; S/14, K = 1): dropping grows with the number of experts, to about 15 % with 16 to 32 experts and
above 40 to 50 % (Experts Choice) or about 25 % (Tokens Choice) with hundreds; Experts Choice drops more and is better
all the same; a little slack lowers dropping by about 5 points; batch priority drops less and is better.
"""

from collections.abc import Iterator
from typing import Any

from softmoe.studies.figures import COLORS, finish, label, legend, line, panels, powers
from softmoe.studies.lab import Cell, Lab
from softmoe.studies.results import Claim, Table, better

SERIES = {
    "experts choice, C = 1": ("experts_choice", {}),
    "tokens choice, C = 1": ("tokens_choice", {}),
    "experts choice, C = 1.125": ("experts_choice", {"capacity_factor": 1.125}),
    "tokens choice, C = 1.125": ("tokens_choice", {"capacity_factor": 1.125}),
    "tokens choice, no priority": ("tokens_choice", {"batch_priority": False}),
}
EC, TC, EC_SLACK, TC_SLACK, TC_PLAIN = SERIES
PAIRS = ((EC, TC), (TC, TC_SLACK), (EC, EC_SLACK), (TC, TC_PLAIN))
"""The paper's four figures."""


def cells(lab: Lab) -> Iterator[Cell]:
    """Run variations only with the most experts at the smaller scales: with few dropped tokens they change little."""
    grid = lab.pick(tiny=(2, 4), small=(4, 16, 64), paper=(16, 32, 64, 128, 256, 512))
    for series, (router, settings) in SERIES.items():
        for experts in grid[-1:] if settings and lab.scale != "paper" else grid:
            yield from lab.over_seeds(
                lab.config(router, num_experts=experts, **settings), series=series, experts=experts
            )


def claims(table: Table) -> Iterator[Claim]:
    few, many = min(table.distinct("experts")), max(table.distinct("experts"))

    def at(series: str, experts: int = many) -> Table:
        return table.where(series=series, experts=experts)

    def more_dropped(a: Table, b: Table, text: str, paper: str) -> Claim:
        return Claim(text, a.minus(b, "drop_rate"), paper, "of tokens")

    for series in (EC, TC):
        yield more_dropped(at(series), at(series, few), f"{series}: {many} experts drop more than {few}", "yes")
    yield more_dropped(at(EC), at(TC), f"Experts Choice drops more ({many} experts)", "40-50 % against 25 %")
    yield from better(at(EC), at(TC), f"Experts Choice is better all the same ({many} experts)")
    for series, slack in ((EC, EC_SLACK), (TC, TC_SLACK)):
        yield more_dropped(at(series), at(slack), f"{series}: slack drops less ({many} experts)", "0.05 less")
    yield more_dropped(at(TC_PLAIN), at(TC), f"batch priority drops less ({many} experts)", "yes")
    yield from better(at(TC), at(TC_PLAIN), f"batch priority is better ({many} experts)")


def figure(table: Table, lab: Lab) -> Any:
    """Draw a row for each of the paper's figures."""
    numbers = ["drop_rate", *table.quality]
    drawing, axes = panels(len(PAIRS), len(numbers), height=3.0)
    for row, pair in zip(axes, PAIRS, strict=True):
        for axis, number in zip(row, numbers, strict=True):
            for series, shade in zip(pair, (1.0, 0.45), strict=True):
                color = COLORS[SERIES[series][0]]
                found = table.where(series=series)
                line(
                    axis, found, "experts", number, color=color, alpha=1.0 if pair == PAIRS[0] else shade, label=series
                )
            if number == "drop_rate":
                draw_paper_shares(axis)
            powers(axis, table.distinct("experts"))
            finish(axis, "experts", "share of tokens dropped" if number == "drop_rate" else label(number))
        legend(row[0])
    return drawing


def draw_paper_shares(axis: Any) -> None:
    """Draw the shares that the paper names."""
    for share, words in ((0.15, "paper, 16-32 experts"), (0.25, "TC, hundreds"), (0.45, "EC, hundreds")):
        axis.axhline(share, color="#bbbbbb", lw=1, ls=":")
        axis.annotate(words, (1.01, share), xycoords=("axes fraction", "data"), va="center", size=7, color="#888888")
    axis.set_ylim(0, max(0.5, axis.get_ylim()[1]))
