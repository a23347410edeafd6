"""Does Soft MoE stay ahead when training goes on for much longer?

One long run of each model at a learning rate that falls as the root of the steps; from several of its checkpoints the
rate is cooled down to zero, which gives the quality of many training lengths for little more than the longest.

The paper (Figure 4, Table 1 and Table 7; S/16 to H/14, up to 4 million steps): Soft MoE outperforms the dense model of
its class on all measures at a fixed training budget, at every length.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from softmoe.budget.paper import read_table
from softmoe.studies.figures import COLORS, NAMES, PAPER_QUALITY, finish, label, legend, panels, round_ticks
from softmoe.studies.jobs import Branch, Training
from softmoe.studies.lab import Cell, Lab
from softmoe.studies.results import Claim, Table, better
from softmoe.train import ScheduleSection

ROUTERS = ("soft", "dense")
PAPER_COLUMNS = {"top1": "jft_p_at_1", "10shot": "in_10shot"}


def cells(lab: Lab) -> Iterator[Cell]:
    """Cooldown of a quarter of the shortest length, from each multiple of it."""
    unit, lengths = lab.pick(tiny=(2, (1, 2)), small=(240, (1, 2, 4)), paper=(500_000, (1, 2, 4, 8)))
    cooldown = max(1, unit // 4)
    warmup = min(lab.base.schedule.warmup, unit - 1)
    schedule = ScheduleSection(kind="rsqrt", peak=lab.base.schedule.peak, warmup=warmup, timescale=max(1, unit // 4))
    for router in ROUTERS:
        config = lab.config(router)
        kept = replace(config.checkpoint, every=unit, keep_every=unit)
        config = replace(config, steps=unit * max(lengths), schedule=schedule, checkpoint=kept)
        for seed in range(lab.seeds):
            parent = Training(replace(config, seed=seed))
            for length in lengths:
                steps = unit * length
                yield Cell({"router": router, "length": steps}, seed, Branch(parent, steps, cooldown))


def claims(table: Table) -> Iterator[Claim]:
    for length in table.distinct("length"):
        soft, dense = (table.where(router=router, length=length) for router in ROUTERS)
        yield from better(soft, dense, f"Soft MoE is better than dense after {length:,} steps")


def figure(table: Table, lab: Lab) -> Any:
    numbers = table.quality
    drawing, axes = panels(2, len(numbers))
    for column, number in enumerate(numbers):
        for router, routing in (("soft", "Soft MoE"), ("dense", "Dense")):
            style = {"color": COLORS[router], "marker": "o", "label": NAMES[router]}
            rows = [row for row in read_table("long_runs_upstream") if row["routing"] == routing]
            for backbone in dict.fromkeys(row["model"] for row in rows):
                same = [row for row in rows if row["model"] == backbone]
                points = sorted((float(r["train_exaflop"]), float(r[PAPER_COLUMNS[number]])) for r in same)
                axes[0][column].plot(*zip(*points, strict=True), color=COLORS[router], marker="o")
                axes[0][column].annotate(
                    backbone.removeprefix("Soft MoE ").removeprefix("ViT "), points[-1], fontsize=7
                )
            ours = table.where(router=router)
            lengths = [ours.where(length=length) for length in ours.distinct("length")]
            xs = [t.mean("tflops") for t in lengths]
            found = [t.interval(number) for t in lengths]
            means = [i.mean for i in found if i is not None]
            halves = [i.half if i.count > 1 else 0.0 for i in found if i is not None]
            axes[1][column].errorbar(xs, means, yerr=halves, capsize=3, **style)
        axes[0][column].set_xscale("log")
        round_ticks(axes[0][column])
        finish(axes[0][column], "paper: training exaFLOP", PAPER_QUALITY[number])
        finish(axes[1][column], "ours: training TFLOPs", label(number))
        legend(axes[1][column])
    return drawing
