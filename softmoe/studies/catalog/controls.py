"""What do slots, experts and learned routing each give over a dense model?

A gain of Soft MoE over a dense model has several possible causes: the slots (cheap rows, and the mixing of tokens into
them), the experts (parameters), and that dispatch and combine are learned. Each is taken away on its own, everything
else and the number of slots kept: one expert with all slots; slots that are plain means of the tokens (Uniform / Soft);
tokens that get the plain mean of the slots (Soft / Uniform); both (Uniform); tokens sent round the experts unmixed
(Identity); and fewer experts at equal slots. The dense model trains with a fifth more FLOPs than Soft MoE, and is the
best of three rates; where slots are fewer than tokens, so does one whose tokens are merged (PatchMerger) into so many
that a step costs what Soft MoE's does. Beside them stands what is ours: the router with a place, with one expert and
with more. Of a recipe whose slots stay tokens the controls are dense models, with tokens merged too, and fewer experts.

The paper (Table 2, Figure 6): learned dispatch and combine both matter, and at equal slots the most experts are best.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from softmoe.studies.figures import NAMES, curve, finish, label, legend, panels, waterfall
from softmoe.studies.lab import Cell, Lab
from softmoe.studies.results import Claim, Table, better, costs

SLOTS_MAY_STAY = True
Step = tuple[str, str]
"""What is added, and the method that has it."""
STEPS: dict[str, tuple[Step, ...]] = {  # ways from the dense model to Soft MoE
    "the paper's layer, by experts": (("slots", "one"), ("experts", "soft")),
    "the paper's layer, by routing": (
        ("mean slots, experts", "uniform"),
        ("learned combine", "uniform_soft"),
        ("learned dispatch", "soft"),
    ),
    "slots with a place (ours)": (("slots with a place", "placed one"), ("experts", "placed")),
}
METHODS = NAMES | {"one": "one expert with the same slots"}
RATES = {"dense": 1.0, "dense half rate": 0.5, "dense twice rate": 2.0}
LADDERS = {"soft": ("one", " experts"), "placed": ("placed one", " placed experts")}
"""For each router the method of one expert, and how the methods of several end."""
CLAIMS = (
    ("one", "dense", "what slots give"),
    ("soft", "one", "what experts give"),
    ("soft", "uniform_soft", "what learned dispatch gives"),
    ("soft", "soft_uniform", "what learned combine gives"),
    ("soft", "identity", "what mixing gives"),
    ("soft", "merged", "what it gives above merged tokens"),
    ("soft", "dense", "all of it"),
    ("placed", "soft", "what a place gives (ours)"),
    ("placed", "placed one", "what experts give where slots have a place (ours)"),
    ("placed", "identity", "what mixing gives where slots have a place (ours)"),
    ("placed", "merged", "what it gives above merged tokens where slots have a place (ours)"),
    ("placed", "dense", "all of it with a place (ours)"),
)
NOT_ALWAYS = ("merged", "uniform_soft", "soft_uniform", "identity")
"""Controls that there are only with fewer slots than tokens, or only where layers combine."""


def cells(lab: Lab) -> Iterator[Cell]:
    for method, factor in RATES.items():
        yield from lab.over_seeds(lab.dense(factor), method=method)
    for method, config in lab.controls().items():
        if method not in ("dense", "one"):
            yield from lab.over_seeds(config, method=method)
    for method in ("soft", "placed") if lab.slots_stay else ("soft", "soft_uniform", "placed", "uniform"):
        yield from lab.over_seeds(lab.config(method), method=method)
    slots = lab.slots
    for router, (one, several) in LADDERS.items():
        for experts in (1, *between(slots)):
            config = lab.config(router, num_experts=experts, slots_per_expert=slots // experts)
            yield from lab.over_seeds(config, method=one if experts == 1 else f"{experts}{several}")


def between(slots: int) -> list[int]:
    """List numbers of experts between one and one a slot, each four times the one before."""
    return [experts for experts in (4, 16, 64, 256) if experts < slots and slots % experts == 0]


def tuned(table: Table) -> Table:
    """Return the table with one dense model, at the rate that is best for it by the mean validation accuracy."""
    best = best_rate(table)
    others = (row for row in table if row.labels["method"] not in RATES)
    return Table((*(replace(row, labels={"method": "dense"}) for row in table.where(method=best)), *others))


def best_rate(table: Table) -> str:
    return max(RATES, key=lambda method: table.where(method=method).mean("top1") or 0.0)


def claims(table: Table) -> Iterator[Claim]:
    table = tuned(table)
    for first, second, what in CLAIMS:
        if second not in NOT_ALWAYS or len(table.where(method=second)):
            text = f"{what}: {METHODS[first]} is better than {METHODS[second]}"
            yield from better(table.where(method=first), table.where(method=second), text)
    for router in LADDERS:
        for fewer, more in pairwise(ladder(table, router)):
            names = [count_of(method, router) for method in (more, fewer)]
            text = f"more experts at equal slots, {METHODS[router]}: {names[0]} are better than {names[1]}"
            yield from better(table.where(method=more), table.where(method=fewer), text)


def notes(table: Table) -> list[str]:
    return [
        f"The dense model of the claims is `{best_rate(table)}`, the best of its three. Means of all models; FLOPs and "
        "processor time as shares of Soft MoE's:",
        costs(table),
    ]


def ladder(table: Table, router: str) -> list[str]:
    """Return the methods that differ in nothing but the number of experts, the fewest first."""
    one, several = LADDERS[router]
    counted = [method for method in table.distinct("method") if method.removesuffix(several).isdigit()]
    return [one, *sorted(counted, key=lambda name: int(name.split()[0])), router]


def count_of(method: str, router: str) -> str:
    return {LADDERS[router][0]: "1", router: "one a slot"}.get(method, method.split()[0])


def figure(table: Table, lab: Lab) -> Any:
    """Draw the ways from dense to Soft MoE; Identity, which is on none, is a line. Then the ladders of experts."""
    numbers, table = table.quality, tuned(table)
    ways = known_ways(table)
    drawing, axes = panels(len(numbers), len(ways) + 1, width=4.6, height=3.4)
    for line, number in zip(axes, numbers, strict=True):
        for axis, (way, steps) in zip(line, ways.items(), strict=False):
            draw_way(axis, table, way, steps, number)
        draw_ladders(line[-1], table, number, lab.slots)
    return drawing


def draw_gains(table: Table, number: str = "top1") -> Any:
    """Draw the ways of which the table has every step, side by side."""
    ways = known_ways(table)
    drawing, axes = panels(1, len(ways), width=5.4, height=2.9)
    for axis, (way, steps) in zip(axes[0], ways.items(), strict=True):
        draw_way(axis, table, way, steps, number)
    return drawing


def known_ways(table: Table) -> dict[str, tuple[Step, ...]]:
    """Return the ways from the dense model to Soft MoE of which the table has every step."""
    known = table.distinct("method")
    return {way: steps for way, steps in STEPS.items() if all(method in known for _, method in steps)}


def draw_way(axis: Any, table: Table, way: str, steps: Sequence[Step], number: str) -> None:
    names = [METHODS["dense"], *(f"+ {what}" for what, _ in steps), METHODS[steps[-1][1]]]
    path = [table.where(method=method) for method in ("dense", *(method for _, method in steps))]
    waterfall(axis, names, path, number)
    for method, name, height in (("identity", "Identity", len(names) - 0.5), ("merged", "tokens merged", -0.8)):
        level = table.where(method=method).mean(number)
        if level is not None:
            axis.axvline(level, color="#888888", ls=":", lw=1)
            clear = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # the line does not cross the word
            axis.annotate(name, (level, height), ha="center", size=8, color="#666666", bbox=clear)
            axis.set_xlim(right=max(axis.get_xlim()[1], 1.15 * level))
            axis.set_ylim(bottom=min(axis.get_ylim()[0], height - 0.1))
    finish(axis, label(number), "")
    axis.set_title(way, fontsize=10)


def draw_ladders(axis: Any, table: Table, number: str, slots: int) -> None:
    for router, color in (("soft", "#3b6fb6"), ("placed", "#6a4c93")):
        methods = ladder(table, router)
        found = [(k, i) for k, m in enumerate(methods) if (i := table.where(method=m).interval(number)) is not None]
        curve(axis, found, color=color, label=METHODS[router])
    level = table.where(method="dense").mean(number)
    if level is not None:
        axis.axhline(level, color="#c8403a", lw=1)
        axis.annotate("dense", (0, level), xytext=(0, 3), textcoords="offset points", color="#c8403a", size=8)
    methods = ladder(table, "soft")
    axis.set_xticks(range(len(methods)), [*(count_of(method, "soft") for method in methods[:-1]), str(slots)])
    legend(axis)
    finish(axis, f"experts, {slots} slots", label(number))
