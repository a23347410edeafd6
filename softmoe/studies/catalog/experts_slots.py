"""How do quality and speed depend on the number of experts and of slots?

Heat maps over experts (columns) and slots per token (rows; for sparse routers the experts per token, K or C), for the
three routers. Quality on a coarse grid, training throughput on a fine one with four times as many tokens.

The paper (Figure 6): Soft MoE is best with the most experts, one slot each, in every row; sparse routers have a modest
best number. Soft MoE's throughput hardly changes with the experts, that of sparse routers falls from a thousand on.
The column of one expert is ours, what slots give without experts, and so are the dense model with a fifth more FLOPs
than Soft MoE with as many slots as tokens, Identity and Uniform / Soft.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from softmoe.budget.paper import read_table
from softmoe.studies.figures import NAMES, finish, heat, label, legend, panels, powers
from softmoe.studies.jobs import Timing
from softmoe.studies.lab import Cell, Lab
from softmoe.studies.results import Claim, Table, beside_controls, better, paired
from softmoe.train import TrainConfig

ROUTERS = ("soft", "tokens_choice", "experts_choice")


def cells(lab: Lab) -> Iterator[Cell]:
    yield from quality_cells(lab)
    for method, config in lab.with_slots(lab.tokens).controls().items():
        if method != "one":
            yield from lab.over_seeds(config, what="control", router=method)
    yield from speed_cells(lab)


def quality_cells(lab: Lab) -> Iterator[Cell]:
    """Run sparse routers only with one expert a token at the smaller scales."""
    grid = lab.pick(
        tiny=((4, 16), (1,)), small=((4, 16, 64), (1, 4)), paper=((16, 32, 64, 128, 256, 512, 1024), (1, 2, 4))
    )
    for router in ROUTERS:
        for rows in grid[1] if router == "soft" or lab.scale == "paper" else (1,):
            for experts in (1, *grid[0]) if router == "soft" else grid[0]:
                config = config_of(lab, router, experts, rows)
                if config is not None:
                    yield from lab.over_seeds(config, what="quality", router=router, experts=experts, rows=rows)


def speed_cells(lab: Lab) -> Iterator[Cell]:
    experts_, rows_ = lab.pick(
        tiny=((2, 4), (1,)), small=((4, 16, 64, 256), (1, 2, 4)), paper=((8, 32, 128, 512, 1024, 4096), (1, 2, 4))
    )
    patch = lab.pick(tiny=8, small=max(1, lab.shape.patch_size // 2), paper=14)
    finer = replace(lab, base=replace(lab.base, model=replace(lab.base.model, patch_size=patch)))
    for router in ROUTERS:
        for rows in rows_:
            for experts in experts_:
                config = config_of(finer, router, experts, rows)
                if config is not None:
                    labels = {"what": "speed", "router": router, "experts": experts, "rows": rows}
                    batch, seconds = min(64, lab.base.data.batch_size), lab.pick(tiny=0.05, small=1.0, paper=10.0)
                    for repeat in range(lab.seeds):
                        yield Cell(labels, repeat, Timing(config.model, lab.image_size, batch, repeat, seconds))


def config_of(lab: Lab, router: str, experts: int, rows: int) -> TrainConfig | None:
    """Find a model with so many rows in the experts for each token; None where slots are fewer than experts."""
    if router == "soft":
        slots, rest = divmod(lab.tokens * rows, experts)
        return None if rest or not slots else lab.config("soft", num_experts=experts, slots_per_expert=slots)
    if rows > experts:
        return None
    settings = {"top_k": rows} if router == "tokens_choice" else {"capacity_factor": float(rows)}
    return lab.config(router, num_experts=experts, **settings)


def claims(table: Table) -> Iterator[Claim]:
    quality, speed = table.where(what="quality"), table.where(what="speed")
    for rows in quality.where(router="soft").distinct("rows"):
        soft = quality.where(router="soft", rows=rows)
        one, *few, many = sorted(soft.distinct("experts"))
        for fewer in (one, *few[:1]):
            text = f"Soft MoE, {rows} slots per token: {many} experts are better than {fewer}"
            yield from better(soft.where(experts=many), soft.where(experts=fewer), text)
    at_tokens = quality.where(router="soft", rows=1)
    one = at_tokens.where(experts=1)
    yield from beside_controls(
        at_tokens.where(experts=max(at_tokens.distinct("experts"), default=1)),
        lambda method: one if method == "one" else table.where(what="control", router=method),
    )
    for router in ROUTERS[1:]:
        lost = slowdown(speed, router), slowdown(speed, "soft")
        text = f"{NAMES[router]} loses more throughput with many experts than Soft MoE"
        yield Claim(text, paired(*lost), "dramatically, from 1,000 experts", "of the throughput")


def slowdown(speed: Table, router: str) -> dict[int, float]:
    """Return by repetition the share of the throughput that the most experts cost.

    At the most rows a token, where all routers have all numbers of experts: with fewer, Soft MoE lacks slots.
    """
    rows = speed.where(router=router, rows=max(speed.distinct("rows")))
    few, many = (rows.where(experts=pick(rows.distinct("experts"))).values("images_per_second") for pick in (min, max))
    return {seed: 1.0 - many[seed] / few[seed] for seed in few if seed in many}


def figure(table: Table, lab: Lab) -> Any:
    numbers = [*table.quality, "images_per_second"]
    drawing, axes = panels(len(numbers) + 1, len(ROUTERS), width=4.2, height=2.5)
    for line, number in zip(axes, numbers, strict=False):
        speed = number == "images_per_second"
        limits = spread(table.where(what="speed" if speed else "quality"), number)
        for axis, router in zip(line, ROUTERS, strict=True):
            rows = table.where(what="speed" if speed else "quality", router=router)
            grid = {
                (e, r): rows.where(experts=e, rows=r).mean(number)
                for e in rows.distinct("experts")
                for r in rows.distinct("rows")
            }
            beside = "" if speed or router != "soft" else controls_text(table, number)
            heat(axis, grid, limits, f"experts{beside}", "rows per token", ".0f" if speed else ".1f")
            axis.set_title(f"{NAMES[router]}: {'images / s, training' if speed else label(number)}", fontsize=10)
    printed(axes[-1])
    return drawing


def controls_text(table: Table, number: str) -> str:
    """Name the levels that have no place on the map."""
    rows = table.where(what="control")
    means = {router: rows.where(router=router).mean(number) for router in rows.distinct("router")}
    told = ", ".join(f"{NAMES[router]} {mean:.1f}" for router, mean in means.items() if mean is not None)
    return f"\n({told})" if told else ""


def spread(rows: Table, number: str) -> tuple[float, float]:
    """Return the smallest and largest mean of all routers, so that equal colors mean equal numbers."""
    places = {tuple(row.labels.items()) for row in rows}
    means = [rows.where(**dict(place)).mean(number) for place in places]
    known = [mean for mean in means if mean is not None]
    return min(known), max(known)


def printed(axes: Any) -> None:
    """The paper prints no numbers for this figure; its Table 9 has these for S/16, one row a token or near it."""
    wanted = {"Soft MoE": ("196",), "Tokens Choice": ("1568",), "Experts Choice": ("196", "1568")}
    for axis, (routing, groups) in zip(axes, wanted.items(), strict=True):
        for group in groups:
            rows = [
                row
                for row in read_table("pareto_runs")
                if (row["model"], row["routing"], row["group_size"]) == ("S/16", routing, group)
                and (routing == "Soft MoE" or row["c"] == "1.0")
                and row["k"] in ("", "1")
            ]
            points = sorted((int(row["experts"]), float(row["in_10shot"])) for row in rows)
            name = None if routing == "Soft MoE" else f"group of {group} tokens"
            axis.plot(*zip(*points, strict=True), marker="o", label=name)
        powers(axis, (16, 32, 64, 128, 256))
        axis.set_ylim(66.5, 74.5)
        legend(axis)
        finish(axis, f"experts (paper, S/16, {routing})", "ImageNet 10-shot (%)")
