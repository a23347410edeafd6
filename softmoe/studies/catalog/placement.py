"""In which blocks should the experts be?

A fixed total of experts (one slot each for Soft MoE) in the last block, in two, in four; at the end or spread out.
Controls that the paper does not have: one expert with the same slots in the same blocks, and the dense model.

The paper (Appendix D, Tables 4 to 6; S/16, 512 experts): split over the last few blocks, about as many experts in each
as there are tokens, is best for all three routers; spread over the depth is worse.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from softmoe.budget.paper import read_table
from softmoe.studies.figures import COLORS, NAMES, bars, finish, label, legend, panels
from softmoe.studies.lab import Cell, Lab
from softmoe.studies.results import Claim, Table, beside_controls, better, exact

ROUTERS = ("soft", "tokens_choice", "experts_choice")
LAST, TWO_LAST, TWO_SPREAD = "last", "two last", "two spread"


def places(lab: Lab) -> dict[str, tuple[int, ...]]:
    last = lab.shape.depth - 1
    return lab.pick(
        tiny={LAST: (1,), TWO_LAST: (0, 1), TWO_SPREAD: (0,)},
        small={
            LAST: (last,),
            "one before last": (last - 1,),
            TWO_LAST: (last - 1, last),
            TWO_SPREAD: ((last - 1) // 2, last),
            "all": tuple(range(last + 1)),
        },
        paper={
            LAST: (11,),
            "one before last": (10,),
            TWO_LAST: (10, 11),
            TWO_SPREAD: (5, 11),
            "four last": (8, 9, 10, 11),
            "four spread": (2, 5, 8, 11),
            "eight last": tuple(range(4, 12)),
            "eight spread": (1, 2, 3, 4, 8, 9, 10, 11),
        },
    )


def cells(lab: Lab) -> Iterator[Cell]:
    total = lab.pick(tiny=8, small=2 * lab.slots, paper=512)
    for name, blocks in places(lab).items():
        each = total // len(blocks)
        for router in ROUTERS:
            config = lab.config(router, num_experts=each, blocks=blocks)
            yield from lab.over_seeds(config, router=router, place=name, blocks=blocks)
        one = lab.config("soft", num_experts=1, slots_per_expert=each, blocks=blocks)
        yield from lab.over_seeds(one, router="one", place=name, blocks=blocks)
        if name == TWO_LAST:
            dense = lab.longer(lab.config("dense"), num_experts=each, blocks=blocks)
            yield from lab.over_seeds(dense, router="dense", place=name, blocks=())


def claims(table: Table) -> Iterator[Claim]:
    for router in ROUTERS:
        rows = table.where(router=router)
        for other in (LAST, TWO_SPREAD):
            text = f"{NAMES[router]}: experts in the two last blocks are better than {other}"
            paper = {number: f"{lead(router, other, number):+.1f} points" for number in ("top1", "10shot")}
            yield from better(rows.where(place=TWO_LAST), rows.where(place=other), text, paper)
    for place in (LAST, TWO_LAST):
        rows = table.where(place=place)
        for claim in beside_controls(rows.where(router="soft"), lambda method, rows=rows: rows.where(router=method)):
            yield replace(claim, text=f"in the {place} {'block' if place == LAST else 'blocks'}, {claim.text}")


def lead(router: str, other: str, number: str) -> float:
    """Return the paper's difference; its rows stand in the order of `places`."""
    column = {"top1": "jft_p_at_1_pct", "10shot": "in_10shot_pct"}[number]
    values = [float(row[column]) for row in read_table(f"placement_{router}")]
    return values[2] - values[{LAST: 0, TWO_SPREAD: 3}[other]]


def figure(table: Table, lab: Lab) -> Any:
    numbers = table.quality
    drawing, axes = panels(len(numbers) + 1, len(ROUTERS), width=4.6, height=2.9)
    for column, router in enumerate(ROUTERS):
        rows = table.where(router=router)
        for line, number in zip(axes, numbers, strict=False):
            places = rows.distinct("place")
            found = [(p, i) for p in places if (i := rows.where(place=p).interval(number)) is not None]
            bars(line[column], found, COLORS[router])
            if router == "soft":
                controls(line[column], table, [place for place, _ in found], number)
            finish(line[column], f"ours, {NAMES[router]}:\n{label(number)}", "")
        printed = read_table(f"placement_{router}")
        names = [f"{row['sparse_layers']} ({row['experts_per_layer']} each)" for row in printed]
        values = [exact(float(row["in_10shot_pct"])) for row in printed]
        bars(axes[-1][column], list(zip(names, values, strict=True)), "#888888")
        finish(axes[-1][column], f"paper, S/16, {NAMES[router]}:\nImageNet 10-shot (%)", "")
    return drawing


def controls(axis: Any, table: Table, names: list[str], number: str) -> None:
    """Draw one expert beside the experts of each place, and the dense model as a line."""
    heights = [len(names) - 1 - index for index in range(len(names))]
    means = [table.where(router="one", place=place).mean(number) for place in names]
    axis.plot(means, heights, "s", color=COLORS["one"], ms=4, label=NAMES["one"])
    level = table.where(router="dense").mean(number)
    if level is not None:
        axis.axvline(level, color=COLORS["dense"], lw=1, label=NAMES["dense"])
    legend(axis)
