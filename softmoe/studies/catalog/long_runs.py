"""Does Soft MoE stay ahead when training goes on for much longer?

One long run of each model at a learning rate that falls as the root of the steps; from several of its checkpoints the
rate is cooled down to zero, which gives the quality of many training lengths for little more than the longest. Beside
them stand controls that the paper does not have: one expert with the same slots, Uniform / Soft, Identity. Dense models
have a fifth more FLOPs than Soft MoE at every length.

The paper (Figure 4, Table 1 and Table 7; S/16 to H/14, up to 4 million steps): Soft MoE outperforms the dense model of
its class on all measures at a fixed training budget, at every length.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from softmoe.budget.paper import read_table
from softmoe.studies.figures import COLORS, NAMES, PAPER_QUALITY, curve, finish, label, legend, panels, round_ticks
from softmoe.studies.jobs import Branch, Training
from softmoe.studies.lab import Cell, Lab
from softmoe.studies.results import Claim, Table, beside_controls
from softmoe.train import ScheduleSection

PAPER_COLUMNS = {"top1": "jft_p_at_1", "10shot": "in_10shot"}


def cells(lab: Lab) -> Iterator[Cell]:
    """Branch off a cooldown, a quarter of the shortest length, at each multiple of that length."""
    unit, lengths = lab.pick(
        tiny=(2, (1, 2)), small=(max(1, lab.base.steps * 4 // 15), (1, 2, 4)), paper=(500_000, (1, 2, 4, 8))
    )
    for router, config in ({"soft": lab.config("soft")} | lab.controls()).items():
        pace = math.ceil(unit * config.steps / lab.base.steps)  # more for dense models, whose steps cost less
        warmup = min(lab.base.schedule.warmup, pace - 1)
        schedule = ScheduleSection(kind="rsqrt", peak=config.schedule.peak, warmup=warmup, timescale=max(1, pace // 4))
        kept = replace(config.checkpoint, every=pace, keep_every=pace)
        config = replace(config, steps=pace * max(lengths), schedule=schedule, checkpoint=kept)
        for seed in range(lab.seeds):
            parent = Training(replace(config, seed=seed))
            for length in lengths:
                branch = Branch(parent, pace * length, max(1, pace // 4))
                yield Cell({"router": router, "length": unit * length}, seed, branch)


def claims(table: Table) -> Iterator[Claim]:
    for length in table.distinct("length"):
        rows = table.where(length=length)
        for claim in beside_controls(rows.where(router="soft"), lambda method, rows=rows: rows.where(router=method)):
            yield replace(claim, text=f"after {length:,} steps, {claim.text}")


def figure(table: Table, lab: Lab) -> Any:
    numbers = table.quality
    drawing, axes = panels(2, len(numbers))
    for (above, below), number in zip(axes.T, numbers, strict=True):
        for router, routing in (("soft", "Soft MoE"), ("dense", "Dense")):
            printed(above, routing, COLORS[router], PAPER_COLUMNS[number])
        for router in table.distinct("router"):
            rows = table.where(router=router)
            lengths = [rows.where(length=length) for length in rows.distinct("length")]
            found = [(t.mean("tflops") or 0.0, i) for t in lengths if (i := t.interval(number)) is not None]
            curve(below, found, color=COLORS[router], ms=4, label=NAMES[router])
        above.set_xscale("log")
        round_ticks(above)
        finish(above, "paper: training exaFLOP", PAPER_QUALITY[number])
        finish(below, "ours: training TFLOPs", label(number))
        legend(below)
    return drawing


def printed(axis: Any, routing: str, color: str, column: str) -> None:
    """Draw the paper's long runs, a line for each size of model."""
    rows = [row for row in read_table("long_runs_upstream") if row["routing"] == routing]
    for backbone in dict.fromkeys(row["model"] for row in rows):
        points = sorted((float(r["train_exaflop"]), float(r[column])) for r in rows if r["model"] == backbone)
        axis.plot(*zip(*points, strict=True), color=color, marker="o")
        axis.annotate(backbone.removeprefix("Soft MoE ").removeprefix("ViT "), points[-1], fontsize=7)
