"""What do slots, experts and learned routing each give over a dense model?

A gain of Soft MoE over a dense model has several possible causes: the slots (cheap rows, and the mixing of tokens into
them), the experts (parameters), and that dispatch and combine are learned. Each is taken away on its own, everything
else and the number of slots kept: one expert with all slots; slots that are plain means of the tokens (Uniform / Soft);
tokens that get the plain mean of the slots (Soft / Uniform); both (Uniform); tokens sent round the experts unmixed
(Identity); and fewer experts at equal slots. Beside them stands what is ours: the router with a place, and one expert
with it.

The paper (Table 2, Figure 6): learned dispatch and combine both matter, and at equal slots the most experts are best.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from softmoe.studies.figures import NAMES, finish, label, panels, waterfall
from softmoe.studies.lab import Cell, Lab
from softmoe.studies.results import Claim, Table, better

STEPS = {  # from the dense model to Soft MoE, on two ways: what is added, and the model that has it
    "by experts": (("slots", "one"), ("experts", "soft"), ("a place (ours)", "placed")),
    "by routing": (
        ("mean slots, experts", "uniform"),
        ("learned combine", "uniform_soft"),
        ("learned dispatch", "soft"),
    ),
}
METHODS = {**NAMES, "one": "one expert with the same slots", "placed one": "one expert with a place"}
CLAIMS = (
    ("one", "dense", "what slots give"),
    ("soft", "one", "what experts give"),
    ("soft", "uniform_soft", "what learned dispatch gives"),
    ("soft", "soft_uniform", "what learned combine gives"),
    ("soft", "identity", "what mixing gives"),
    ("soft", "dense", "all of it"),
    ("placed", "soft", "what a place gives (ours)"),
    ("placed", "placed one", "what experts give where slots have a place (ours)"),
)


def cells(lab: Lab) -> Iterator[Cell]:
    for method in ("dense", "soft", "uniform_soft", "soft_uniform", "identity", "placed"):
        yield from lab.over_seeds(lab.config(method), method=method)
    # with the same input and the same weight everywhere, experts that start as copies would stay copies
    yield from lab.over_seeds(lab.config("uniform", identical_init=False), method="uniform")
    slots = lab.slots
    for method, router in (("one", "soft"), ("placed one", "placed")):
        yield from lab.over_seeds(lab.config(router, num_experts=1, slots_per_expert=slots), method=method)
    for experts in between(slots):
        config = lab.config("soft", num_experts=experts, slots_per_expert=slots // experts)
        yield from lab.over_seeds(config, method=f"{experts} experts")


def between(slots: int) -> list[int]:
    """Numbers of experts between one and one a slot, each four times the one before."""
    return [experts for experts in (4, 16, 64, 256) if experts < slots and slots % experts == 0]


def claims(table: Table) -> Iterator[Claim]:
    for first, second, what in CLAIMS:
        text = f"{what}: {METHODS[first]} is better than {METHODS[second]}"
        yield from better(table.where(method=first), table.where(method=second), text)
    ladder = experts_ladder(table)
    for fewer, more in pairwise(ladder):
        text = f"more experts at equal slots: {ladder_name(more)} are better than {ladder_name(fewer)}"
        yield from better(table.where(method=more), table.where(method=fewer), text)


def experts_ladder(table: Table) -> list[str]:
    """The methods that differ in nothing but the number of experts, the fewest first."""
    counted = [method for method in table.distinct("method") if method.endswith(" experts")]
    return ["one", *sorted(counted, key=lambda name: int(name.split()[0])), "soft"]


def ladder_name(method: str) -> str:
    return {"one": "1", "soft": "one a slot"}.get(method, method.split()[0])


def figure(table: Table, lab: Lab) -> Any:
    """Draw two ways from dense to Soft MoE; Identity, which is on neither, is a line."""
    numbers = table.quality
    drawing, axes = panels(len(numbers), len(STEPS) + 1, width=4.6, height=3.4)
    for line, number in zip(axes, numbers, strict=True):
        for axis, (way, steps) in zip(line, STEPS.items(), strict=False):
            names = [METHODS["dense"], *(f"+ {what}" for what, _ in steps), METHODS[steps[-1][1]]]
            path = [table.where(method=method) for method in ("dense", *(method for _, method in steps))]
            waterfall(axis, names, path, number)
            identity = table.where(method="identity").mean(number)
            if identity is not None:
                axis.axvline(identity, color="#888888", ls=":", lw=1)
                axis.annotate("Identity", (identity, len(names) - 0.5), ha="center", size=8, color="#666666")
            finish(axis, label(number), "")
            axis.set_title(way, fontsize=10)
        draw_ladder(line[-1], table, number)
    return drawing


def draw_ladder(axis: Any, table: Table, number: str) -> None:
    ladder = experts_ladder(table)
    found = [(ladder_name(m), i) for m in ladder if (i := table.where(method=m).interval(number)) is not None]
    errors = [i.half if i.count > 1 else 0.0 for _, i in found]
    axis.errorbar(range(len(found)), [i.mean for _, i in found], yerr=errors, marker="o", capsize=3, color="#3b6fb6")
    dense = table.where(method="dense").mean(number)
    if dense is not None:
        axis.axhline(dense, color="#c8403a", lw=1)
        axis.annotate("dense", (0, dense), xytext=(0, 3), textcoords="offset points", color="#c8403a", size=8)
    axis.set_xticks(range(len(found)), [name for name, _ in found])
    finish(axis, "experts, at equal slots", label(number))
