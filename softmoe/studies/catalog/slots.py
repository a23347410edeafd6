"""For a fixed number of experts, do more slots help?

Soft MoE and Experts Choice with few experts and a growing number of rows for each. Controls that the paper does not
have: one expert with the same slots; dense models with a fifth more FLOPs than the Soft MoE of each number of rows, and
with their tokens merged where slots are fewer than tokens.

The paper (Appendix C; S/16, 32 experts): Soft MoE gains only modestly from more slots per expert while the cost grows;
Experts Choice gains much more, and catches up with large groups at a very large cost.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from softmoe.budget.paper import read_table
from softmoe.studies.figures import COLORS, NAMES, finish, label, legend, line, panels, powers
from softmoe.studies.lab import Cell, Lab
from softmoe.studies.results import Claim, Table, beside_controls, better, paired

ROUTERS = ("soft", "experts_choice")
CONTROLS = ("one", "dense", "merged")


def cells(lab: Lab) -> Iterator[Cell]:
    experts = lab.pick(tiny=4, small=4, paper=32)
    for slots in lab.pick(tiny=(1, 4), small=(1, 4, 16), paper=(1, 2, 4, 8, 16, 32)):
        factor = slots * experts / lab.tokens
        soft = lab.config("soft", num_experts=experts, slots_per_expert=slots)
        yield from lab.over_seeds(soft, router="soft", rows=factor)
        choice = lab.config("experts_choice", num_experts=experts, capacity_factor=factor)
        yield from lab.over_seeds(choice, router="experts_choice", rows=factor)
        for method, config in lab.with_slots(slots * experts).controls().items():
            if method in CONTROLS:
                yield from lab.over_seeds(config, router=method, rows=factor)


def claims(table: Table) -> Iterator[Claim]:
    few, many = min(table.distinct("rows")), max(table.distinct("rows"))
    ends = {router: [table.where(router=router, rows=rows) for rows in (many, few)] for router in ROUTERS}
    for router, (more, less) in ends.items():
        yield from better(more, less, f"{NAMES[router]} gains from more rows per expert")
    for number in table.quality:
        gains = {router: more.gains(less, number) for router, (more, less) in ends.items()}
        text = f"Experts Choice gains more from them than Soft MoE: {number}"
        yield Claim(text, paired(gains["experts_choice"], gains["soft"]), "much more")
    for rows in table.distinct("rows"):
        same = table.where(rows=rows)
        for claim in beside_controls(same.where(router="soft"), lambda method, same=same: same.where(router=method)):
            yield replace(claim, text=f"{rows:g} rows per token, {claim.text}")


def figure(table: Table, lab: Lab) -> Any:
    numbers = [*table.quality, "tflops"]
    drawing, axes = panels(1, len(numbers) + 1, height=3.4)
    for axis, number in zip(axes[0], numbers, strict=False):
        for router in (*ROUTERS, *CONTROLS):
            line(axis, table.where(router=router), "rows", number, color=COLORS[router], label=NAMES[router])
        powers(axis, table.distinct("rows"))
        finish(axis, "rows in the experts per token", "training TFLOPs" if number == "tflops" else label(number))
    legend(axes[0][0])
    for group in ("196", "1568"):
        rows = [
            row
            for row in read_table("pareto_runs")
            if (row["model"], row["routing"], row["experts"], row["group_size"])
            == ("S/16", "Experts Choice", "32", group)
        ]
        points = [(float(row["c"]), float(row["in_10shot"])) for row in rows]
        axes[0][-1].plot(*zip(*points, strict=True), marker="o", label=f"Experts Choice, groups of {group}")
    axes[0][-1].axhline(70.8, color=COLORS["soft"], ls=":", label="Soft MoE, 32 slots for 196 tokens")
    legend(axes[0][-1])
    finish(axes[0][-1], "paper, S/16, 32 experts: C", "ImageNet 10-shot (%)")
    return drawing
