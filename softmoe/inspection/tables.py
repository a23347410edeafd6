"""The layers of a model in one table of text: what to read first."""

from typing import Any

from softmoe.inspection.collect import Inspection

DENSE = (
    ("scale", lambda r: r["correlation"] and r["correlation"]["scale"], ".3g"),
    ("largest dispatch", lambda r: r["dispatch"]["mean_largest"], ".3f"),
    ("tokens per slot", lambda r: r["dispatch"]["effective"], ".1f"),
    ("tokens for 90 %", lambda r: r["tokens_per_slot"]["levels"]["0.9"]["mean"], ".1f"),
    ("largest combine", lambda r: r["combine"]["mean_largest"], ".3f"),
    ("slots per token", lambda r: r["combine"]["effective"], ".1f"),
    ("tokens above 2", lambda r: r["token_mass"]["above_2"], ".1%"),
    ("tokens up to 0.25", lambda r: r["token_mass"]["up_to_0.25"], ".1%"),
    ("expert max/min", lambda r: r["importance"]["max_over_min"], ".1f"),
)
SPARSE = (
    ("dropped", lambda r: r["dropped"], ".1%"),
    ("places filled", lambda r: r["filled"], ".1%"),
    ("largest load", lambda r: max(r["load"]), ".1%"),
    ("idle experts", lambda r: r["idle_experts"], ".1%"),
)
NOTES = (
    ("largest dispatch, largest combine", "largest weight of a slot (of a token), mean over slots (tokens) and images"),
    ("tokens per slot, slots per token", "effective number: exp of the entropy of the weights"),
    ("tokens for 90 %", "how many tokens make 90 % of a slot's weight, mean over slots and images"),
    ("tokens above 2, up to 0.25", "tokens whose dispatch weights, summed over all slots, are so large or small"),
    ("expert max/min", "mean combine weight of the most important expert over that of the least important one"),
    ("dropped", "tokens that no expert takes"),
)


def header(model: Inspection) -> list[str]:
    return ["layer", "router", "slots", "tokens", *(name for name, _, _ in columns(model))]


def layer_lines(model: Inspection) -> list[list[str]]:
    """One line of text per layer; "-" where a column does not fit the kind of router."""
    lines = []
    for name, r in model.layers.items():
        slots = r["experts"] * r["slots_per_expert"]
        cells = [name.removeprefix("encoder."), r["router"], str(slots), str(r["tokens"])]
        known = DENSE if r["kind"] == "dense" else SPARSE
        cells += [show(get(r), form) if (title, get, form) in known else "-" for title, get, form in columns(model)]
        lines.append(cells)
    return lines


def columns(model: Inspection) -> list[tuple[str, Any, str]]:
    kinds = {r["kind"] for r in model.layers.values()}
    return [*(DENSE if "dense" in kinds else ()), *(SPARSE if "sparse" in kinds else ())]


def show(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def as_text(model: Inspection) -> str:
    """Columns under each other: words to the left, numbers to the right."""
    lines = [header(model), *layer_lines(model)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
