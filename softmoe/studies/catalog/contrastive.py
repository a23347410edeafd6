"""Is Soft MoE better at learning images from captions, and who profits from augmentation?

Two towers from scratch, the image tower dense, Experts Choice or Soft MoE, with plain resizing or random crops.
Judged by how often, among the pairs of a batch, an image's own caption is the nearest and the other way round.

The paper (Figure 15, LAION-400M, B/16, 128 experts; Table 3 for text towers on frozen models): Soft MoE is better than
both, and gains from augmentation, while neither the dense model nor Experts Choice does.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from softmoe.budget.paper import read_table
from softmoe.recipes import contrastive
from softmoe.studies.figures import COLORS, NAMES, bars, finish, panels
from softmoe.studies.lab import Cell, Lab
from softmoe.studies.results import Claim, Table, better, exact, paired
from softmoe.train import ObjectiveSection, TextSection, TrainConfig

ROUTERS = ("soft", "dense", "experts_choice")
PLACES = tuple((router, augmented) for router in ROUTERS for augmented in (False, True))
SMALL_TEXT = TextSection(
    size="ti", width=64, depth=2, heads=4, mlp_dim=256, length=20, vocab_size=512, mask_padding=True
)


def cells(lab: Lab) -> Iterator[Cell]:
    for router, augmented in PLACES:
        config = towers(lab, router)
        transform = replace(config.data.transform, crop="inception" if augmented else "resize")
        config = replace(config, data=replace(config.data, transform=transform))
        yield from lab.over_seeds(config, router=router, augmented=augmented)


def towers(lab: Lab, router: str) -> TrainConfig:
    """Return the settings of two towers. Data needs captions: `shapes`, or pairs as for `softmoe train contrastive`."""
    if lab.scale == "paper":
        config = contrastive.recipe()
        data = replace(config.data, train=lab.base.data.train)
        return replace(config, data=data, model=config.model.change(router=router))
    return replace(lab.config(router), text=SMALL_TEXT, objective=ObjectiveSection(loss="sigmoid"))


def claims(table: Table) -> Iterator[Claim]:
    by = {(router, augmented): table.where(router=router, augmented=augmented) for router, augmented in PLACES}
    for other in ROUTERS[1:]:
        text = f"Soft MoE is better than {NAMES[other]} without augmentation"
        yield from better(by["soft", False], by[other, False], text)
    yield from better(by["soft", True], by["soft", False], "Soft MoE gains from augmentation")
    for other in ROUTERS[1:]:
        found = {router: by[router, True].gains(by[router, False], "top1") for router in ("soft", other)}
        text = f"it gains more from it than {NAMES[other]}: pairs matched"
        yield Claim(text, paired(found["soft"], found[other]), "yes")


def figure(table: Table, lab: Lab) -> Any:
    drawing, axes = panels(1, 2, width=5.0, height=3.6)
    ours, printed = axes[0]
    found = [
        (f"{NAMES[router]}, {'crops' if augmented else 'plain'}", interval)
        for router, augmented in PLACES
        if (interval := table.where(router=router, augmented=augmented).interval("top1")) is not None
    ]
    bars(ours, found, COLORS["soft"])
    finish(ours, "ours: pairs matched in a batch (%), 95 % interval", "")
    rows = read_table("lit")
    names = [row["model"] + (f", {row['experts']} experts" if row["experts"] else "") for row in rows]
    bars(printed, [(n, exact(float(row["in_0shot_pct"]))) for n, row in zip(names, rows, strict=True)], "#888888")
    printed.tick_params(axis="y", labelsize=7)
    finish(printed, "paper, Table 3: ImageNet zero-shot (%)", "")
    return drawing
