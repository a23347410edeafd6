"""What does fine-tuning at a higher resolution cost, if the slots stay as many?

The cost of the paper's models at 224 and at 384 pixels by formula, and small models fine-tuned at their own resolution
and at twice as many pixels a side.

The paper (Appendix F, Table 7): slots are not increased in fine-tuning, so Soft MoE becomes cheaper than dense as
tokens grow from 196 to 576 (or 256 to 729), and it is better after fine-tuning: 86.8 against 84.0 % for S/16.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from softmoe.budget import cost
from softmoe.budget.paper import read_table
from softmoe.recipes import finetune
from softmoe.studies.figures import COLORS, NAMES, bars, finish, label, legend, line, panels
from softmoe.studies.jobs import Finetuning, Training
from softmoe.studies.lab import Cell, Lab
from softmoe.studies.results import Claim, Row, Table, better, exact
from softmoe.train import TrainConfig

ROUTERS = ("soft", "dense")
PAPER_PAIRS = (("soft_s16_128e", "vit_s16"), ("soft_b16_128e", "vit_b16"), ("soft_l16_128e", "vit_l16"))
SIZES = (224, 384)


def cells(lab: Lab) -> Iterator[Cell]:
    for router in ROUTERS:
        for size in (lab.image_size, 2 * lab.image_size):
            for seed in range(lab.seeds):
                parent = Training(replace(lab.config(router), seed=seed))
                labels = {"what": "fine-tuned", "router": router, "pixels": size}
                yield Cell(labels, seed, Finetuning(parent, replace(recipe(lab, size), seed=seed)))


def recipe(lab: Lab, size: int) -> TrainConfig:
    """Return the recipe for fine-tuning, on the transfer data if there is any, at the scale of the lab."""
    config, base = finetune.recipe(), lab.base
    steps = lab.pick(tiny=2, small=300, paper=10_000)
    data = replace(base.data, train=lab.transfer or base.data.train)
    return replace(
        config,
        steps=steps,
        data=replace(data, transform=replace(data.transform, image_size=size)),
        schedule=replace(config.schedule, warmup=steps // 10),
        evaluation=base.evaluation,
        checkpoint=base.checkpoint,
        log=base.log,
        threads=base.threads,
    )


def rows(lab: Lab) -> Iterator[Row]:
    """Return the paper's models by formula."""
    for pair in PAPER_PAIRS:
        for router, name in zip(ROUTERS, pair, strict=True):
            for size in SIZES:
                price = cost(name, image_size=size, convention="paper")
                labels = {"what": "formula", "router": router, "pixels": size, "model": name}
                yield Row(labels, 0, {"mflops": price.forward_flops / 1e6, "params": float(price.params)})


def claims(table: Table) -> Iterator[Claim]:
    for soft, dense in PAPER_PAIRS:
        saved = {size: 1.0 - flops(table, soft, size) / flops(table, dense, size) for size in SIZES}
        text = f"{soft} costs less than {dense} at {SIZES[1]} pixels, and by more than at {SIZES[0]}"
        yield Claim(text, exact(min(saved[384], saved[384] - saved[224])), "yes", "of the FLOPs saved in addition")
    tuned = table.where(what="fine-tuned")
    for size in tuned.distinct("pixels"):
        soft, dense = (tuned.where(router=router, pixels=size) for router in ROUTERS)
        yield from better(soft, dense, f"Soft MoE is better after fine-tuning at {size} pixels")


def flops(table: Table, model: str, size: int) -> float:
    found = table.where(model=model, pixels=size).mean("mflops")
    assert found is not None
    return found


def figure(table: Table, lab: Lab) -> Any:
    drawing, axes = panels(1, 3, width=4.8, height=3.6)
    by_formula, ours, printed = axes[0]
    for router in ROUTERS:
        for index, pair in enumerate(PAPER_PAIRS):
            name = pair[ROUTERS.index(router)]
            values = [flops(table, name, size) / flops(table, pair[1], size) for size in SIZES]
            style = {"color": COLORS[router], "marker": "o", "ls": ("-", "--", ":")[index]}
            by_formula.plot(SIZES, values, label=name if router == "soft" or not index else None, **style)
        tuned = table.where(what="fine-tuned", router=router)
        line(ours, tuned, "pixels", "top1", color=COLORS[router], label=NAMES[router])
    by_formula.set_xticks(SIZES)
    legend(by_formula)
    finish(by_formula, "pixels, by formula", "forward FLOPs / the dense model's")
    if len(table.where(what="fine-tuned")):
        legend(ours)
    else:
        ours.text(0.5, 0.5, "not run", ha="center", transform=ours.transAxes, color="#888888")
    finish(ours, "pixels of fine-tuning, ours", label("top1"))
    models = [row for row in read_table("long_runs_upstream") if row["train_steps"] in ("4M", "2M")]
    theirs = [(f"{row['model']}, {row['train_steps']}", exact(float(row["in_finetune"]))) for row in models]
    bars(printed, theirs, "#888888")
    printed.tick_params(axis="y", labelsize=7)
    finish(printed, "paper: fine-tuned at 384 pixels (%)", "")
    return drawing
