"""Do the slots of one expert ask for different things?

Inner products of the normalized slot parameters, for models with 1, 4 and 16 slots per expert.

The paper (Appendix J; S/16): slots of the same expert are extremely aligned, slots of different experts show no clear
relation. So more slots per expert add little.
"""

from collections.abc import Iterator
from statistics import fmean
from typing import Any

from softmoe.inspection.statistics import correlation_summary, slot_correlation
from softmoe.moe import SoftRouter
from softmoe.moe.record import routers_by_layer
from softmoe.studies.figures import panels, said
from softmoe.studies.lab import Cell, Lab
from softmoe.studies.results import Claim, Row, Table, paired


def cells(lab: Lab) -> Iterator[Cell]:
    for experts, slots in lab.pick(
        tiny=((16, 1), (4, 4)), small=((16, 1), (4, 4), (4, 16)), paper=((128, 1), (32, 4), (8, 16))
    ):
        config = lab.config("soft", num_experts=experts, slots_per_expert=slots)
        yield from lab.over_seeds(config, experts=experts, slots=slots)


def routers(row: Row) -> list[SoftRouter]:
    """Return the routers of the trained model by block."""
    from softmoe.evaluate.inputs import load

    found = routers_by_layer(load(row.folder, device="cpu").model).values()
    return [router for router in found if isinstance(router, SoftRouter)]


def measure(row: Row) -> dict[str, float]:
    """Return mean inner products within and between experts, over the layers."""
    summaries = [summary for router in routers(row) if (summary := correlation_summary(router)) is not None]
    names = ("within_expert", "between_experts")
    return {name: fmean(s[name] for s in summaries) for name in names if summaries[0][name] is not None}


def claims(table: Table) -> Iterator[Claim]:
    for slots in table.distinct("slots"):
        if slots > 1:
            rows = table.where(slots=slots)
            gap = paired(rows.values("within_expert"), rows.values("between_experts"))
            text = f"{slots} slots per expert: those of one expert are more alike than those of different experts"
            yield Claim(text, gap, "extremely aligned", "of cosine")
    many, one = max(table.distinct("slots")), min(table.distinct("slots"))
    text = f"more slots per expert: no useful gain ({one} slot of more experts is as good or better)"
    for number in table.quality:
        equal = [row for row in table if row.labels["slots"] * row.labels["experts"] == total(table, one)]
        rows = Table(tuple(row for row in equal if row.labels["slots"] > 1))
        if len(rows) and many > 1:
            yield Claim(f"{text}: {number}", table.where(slots=one).minus(rows, number), "yes")


def total(table: Table, slots: int) -> int:
    return slots * table.where(slots=slots).distinct("experts")[0]


def figure(table: Table, lab: Lab) -> Any:
    """Draw the matrix of every layer (columns) for each number of slots (rows), of the first seed."""
    rows = [table.where(slots=slots).rows[0] for slots in table.distinct("slots")]
    layers = [routers(row) for row in rows]
    drawing, axes = panels(len(rows), max(map(len, layers)), width=3.3, height=3.0)
    picture = None
    for line, row, found in zip(axes, rows, layers, strict=True):
        for index, (axis, router) in enumerate(zip(line, found, strict=True)):
            picture = axis.imshow(slot_correlation(router).numpy(), vmin=-1, vmax=1, cmap="RdBu_r")
            name = f"{row.labels['experts']} experts x {row.labels['slots']}"
            axis.set_title(f"{name}, MoE layer {index + 1}", fontsize=10)
            axis.set(xlabel="slots, by expert")
            axis.locator_params(integer=True)
    drawing.colorbar(picture, ax=axes, shrink=0.6, label="inner product of slot parameters")
    said(drawing, "slots of one expert are extremely aligned,\nothers show no clear relation (Appendix J)")
    return drawing
