"""Can a small Soft MoE, trained for longer, replace a large dense model?

A narrow model trained three times as long, dense and Soft MoE, against a dense model of twice the width.

The paper (Figure 5, Table 1): Soft MoE B/16 trained for 1,000 TPU days matches or outperforms ViT H/14 trained at a
similar cost, with a tenth of its FLOPs at inference; L/16 is better than every ViT at half of H/14's time.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from softmoe.budget.paper import read_table
from softmoe.studies.figures import COLORS, curve, finish, label, panels, round_ticks
from softmoe.studies.lab import Cell, Lab, wide
from softmoe.studies.results import Claim, Table, better, exact

LONGER = 3
PAPER_COLUMNS = {"top1": "jft_p_at_1", "10shot": "in_10shot"}
SMALL_SOFT, SMALL_DENSE, LARGE = "small Soft MoE, longer", "small dense, longer", "large dense"


def cells(lab: Lab) -> Iterator[Cell]:
    large = lab.pick(tiny=wide(32), small=wide(64), paper={"width": 1024, "depth": 24, "mlp_dim": 4096, "heads": 16})
    for model, router in ((SMALL_SOFT, "soft"), (SMALL_DENSE, "dense")):
        config = lab.config(router)
        yield from lab.over_seeds(replace(config, steps=LONGER * config.steps), model=model)
    yield from lab.over_seeds(lab.config("dense", **large), model=LARGE)


def claims(table: Table) -> Iterator[Claim]:
    soft, dense, large = (table.where(model=model) for model in (SMALL_SOFT, SMALL_DENSE, LARGE))
    yield from better(soft, large, "a small Soft MoE trained longer is better than a large dense model")
    yield from better(soft, dense, "a small Soft MoE trained longer is better than a small dense one")
    for number, words in (("mflops", "to run"), ("tflops", "to train")):
        costs = large.mean(number), soft.mean(number)
        ratio = None if None in costs else exact((costs[0] or 0.0) / (costs[1] or 1.0) - 1.0)
        paper = "10 times (B/16 and H/14)" if number == "mflops" else "1.2 times"
        yield Claim(f"the large dense model costs more {words}", ratio, paper, "times more")


def figure(table: Table, lab: Lab) -> Any:
    numbers = table.quality
    drawing, axes = panels(2, len(numbers))
    for column, number in enumerate(numbers):
        for row in read_table("long_runs"):
            point = float(row["eval_gflop_per_img"]), float(row[PAPER_COLUMNS[number]])
            axes[0][column].plot(*point, "o", color=COLORS["dense" if row["routing"] == "Dense" else "soft"])
            axes[0][column].annotate(
                f"{row['model']}, {row['train_steps']}", point, xytext=(0, 5), textcoords="offset points", fontsize=7
            )
        for model, color in ((SMALL_SOFT, "soft"), (SMALL_DENSE, "dense"), (LARGE, "dense")):
            found, x = table.where(model=model).interval(number), table.where(model=model).mean("mflops")
            if found is not None and x is not None:
                curve(axes[1][column], [(x, found)], ls="", color=COLORS[color])
                axes[1][column].annotate(model, (x, found.mean), xytext=(0, 5), textcoords="offset points", fontsize=8)
        finish(axes[0][column], "paper: inference GFLOP / image", label(number, paper=True))
        finish(axes[1][column], "ours: inference MFLOP / image", label(number))
        for axis in axes[:, column]:
            axis.set_xscale("log")
            axis.margins(x=0.35)
            round_ticks(axis)
    return drawing
