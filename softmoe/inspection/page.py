"""Write inspect.json, figures, and one page that opens from disk, to choose images, layers and slots from.

The table of its layers can be had as plain text too.

Names of models, files and classes may come from strangers. They reach the page escaped, inside JSON without "<", and
are put in place as text; a content policy lets no script run but the page's own.
"""

import base64
import hashlib
import json
import zlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from markupsafe import Markup

from softmoe import __version__
from softmoe.budget.report import aligned
from softmoe.inspection import plots
from softmoe.inspection.collect import FINEST, Inspection, Steps, Weights, WeightTable, layer_label
from softmoe.storage.files import write_text
from softmoe.storage.pages import data_address, render, thumbnail

PAGE = 4_700_000  # bytes for weights, pictures and figures; weights are as fine as fits, so a page stays below 5 MB
LEVELS = (FINEST, 127, 63, 31, 15)
THUMBNAIL = 256
DENSE = (
    ("scale", lambda r: r["correlation"] and r["correlation"]["scale"], ".3g"),
    ("largest dispatch", lambda r: r["dispatch"]["mean_largest"], ".3f"),
    ("tokens per slot", lambda r: r["dispatch"]["effective"], ".1f"),
    ("tokens for 90 %", lambda r: r["tokens_per_slot"]["levels"]["0.9"]["mean"], ".1f"),
    ("largest combine", lambda r: r["combine"]["mean_largest"] if r.get("combines", True) else None, ".3f"),
    ("slots per token", lambda r: r["combine"]["effective"] if r.get("combines", True) else None, ".1f"),
    ("tokens above 2", lambda r: r["token_mass"]["above_2"], ".1%"),
    ("tokens up to 0.25", lambda r: r["token_mass"]["up_to_0.25"], ".1%"),
    ("expert max/min", lambda r: r["importance"]["max_over_min"] if r.get("combines", True) else None, ".1f"),
)
SPARSE = (
    ("dropped", lambda r: r["dropped"], ".1%"),
    ("places filled", lambda r: r["filled"], ".1%"),
    ("largest load", lambda r: max(r["load"]), ".1%"),
    ("idle experts", lambda r: r["idle_experts"], ".1%"),
)
NOTES = (
    ("largest dispatch, largest combine", "largest weight of a slot (of a token), mean over slots (tokens) and images"),
    ("tokens per slot, slots per token", "over how many the weight is spread: exp of its entropy"),
    ("tokens for 90 %", "how many tokens make 90 % of a slot's weight, mean over slots and images"),
    ("tokens above 2, up to 0.25", "tokens whose dispatch weights, summed over all slots, are so large or small"),
    ("expert max/min", "mean combine weight of the most important expert over that of the least important one"),
    ("dropped", "sparse routers: tokens that no expert takes"),
)


def write_inspection(models: Sequence[Inspection], folder: Path, *, title: str, about: dict[str, Any]) -> list[Path]:
    """Write inspect.json, figures/*.png and *.svg, and inspect.html. Without matplotlib the page has no figures."""
    content = {
        "softmoe": __version__,
        "torch": str(torch.__version__),
        **about,
        "models": [m.to_dict() for m in models],
    }
    data = write_text(folder / "inspect.json", json.dumps(rounded(content), allow_nan=False) + "\n")
    written, shown = [data], []
    for number, model in enumerate(models):
        where = folder / "figures" if number == 0 else folder / "figures" / f"model_{number + 1}"
        drawn = plots.write_figures(model, where) if plots.available() else []
        written += [path for figure in drawn for path in figure.paths]
        shown.append([(figure.caption, figure.small_png) for figure in drawn])
    lead = f"{models[0].images:,} images of {about['data']}, split {about['split']}."
    written.append(write_page(models, folder / "inspect.html", title=title, lead=lead, figures=shown))
    return written


def rounded(value: Any) -> Any:
    """Round to seven digits: more than anyone reads, and half the file."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value


def write_page(
    models: Sequence[Inspection],
    path: Path,
    *,
    title: str,
    lead: str = "",
    figures: Sequence[Sequence[tuple[str, bytes]]] = (),
) -> Path:
    """Write the page; `figures` gives for each model its (caption, PNG) pairs."""
    room = files("softmoe.inspection")
    script, style = (room.joinpath(name).read_text("utf-8") for name in ("page.js", "page.css"))
    assert "</" not in script
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = render(
        "softmoe.inspection",
        "page.html",
        title=title,
        lead=lead,
        script=Markup(script),
        script_hash=Markup(f"sha256-{digest}"),
        style=Markup(style),
        data=Markup(safe_json(page_data(models, spent=sum(4 * len(png) // 3 for part in figures for _, png in part)))),
        tables=[{"name": m.name, "header": header(m), "lines": layer_lines(m)} for m in models],
        notes=notes_of(models),
        figures=[
            {"name": m.name, "pictures": [{"caption": c, "source": data_address(png)} for c, png in pictures]}
            for m, pictures in zip(models, figures, strict=False)
        ],
    )
    return write_text(path, text)


def page_data(models: Sequence[Inspection], spent: int = 0) -> dict[str, Any]:
    """Collect what the script works on. Pictures that two models share are kept once. `spent` is what figures take."""
    pictures: dict[str, int] = {}
    drawn = [[thumbnail(s.pixels, THUMBNAIL, keep_pixels=True) for s in model.samples] for model in models]
    shown = [[pictures.setdefault(picture, len(pictures)) for picture in part] for part in drawn]
    packed = pack_all(models, PAGE - spent - sum(map(len, pictures)))
    return {"models": [model_data(*one) for one in zip(models, shown, packed, strict=True)], "pictures": list(pictures)}


def model_data(model: Inspection, pictures: list[int], packed: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": model.name,
        "images": [
            {"picture": picture, "caption": s.caption, "prediction": s.prediction, "grid": s.grid}
            for s, picture in zip(model.samples, pictures, strict=True)
        ],
        "layers": [
            {
                "label": f"{layer_label(name)}: {layer['router']}",
                "soft": layer["kind"] == "dense",
                "tokens": layer["tokens"],
                "slots": layer["experts"] * layer["slots_per_expert"],
                "slots_per_expert": layer["slots_per_expert"],
                "blocks": [blocks[name] for blocks in packed],
            }
            for name, layer in model.layers.items()
        ],
    }


def pack_all(models: Sequence[Inspection], budget: int) -> list[list[dict[str, Any]]]:
    """Pack the weights of all samples of all models, in the finest steps that fit the budget, or else the coarsest."""
    packed: list[list[dict[str, Any]]] = []
    for levels in LEVELS:
        packed = [
            [{name: pack_weights(w.coarser(levels)) for name, w in sample.weights.items()} for sample in model.samples]
            for model in models
        ]
        blocks = [block for model in packed for sample in model for block in sample.values()]
        if sum(len(table["bytes"]) for block in blocks for table in block.values() if table) <= budget:
            break
    return packed


def pack_weights(weights: Weights) -> dict[str, Any]:
    return {
        "dispatch": pack_table(weights.dispatch),
        "combine": None if weights.combine is None else pack_table(weights.combine),
    }


def pack_table(table: WeightTable) -> dict[str, Any]:
    """Pack the codes: tokens and slots (soft only, two bytes each), then the rest; deflated, in base64."""
    parts: dict[str, Steps] = {"rest": table.rest_MS}
    raw = b""
    if table.soft:
        assert table.token_M is not None
        assert table.slot_S is not None
        parts |= {"token": table.token_M, "slot": table.slot_S}
        raw = table.token_M.codes.astype("<u2").tobytes() + table.slot_S.codes.astype("<u2").tobytes()
    raw += table.rest_MS.codes.astype(np.uint8).tobytes()
    return {
        "soft": table.soft,
        **{name: [part.low, part.step] for name, part in parts.items()},
        "bytes": base64.b64encode(zlib.compress(raw, 6)).decode(),
    }


def safe_json(value: Any) -> str:
    """Return JSON that may stand inside a script element: it has no "<", so nothing in it can end the element."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def header(model: Inspection) -> list[str]:
    return ["layer", "router", "slots", "tokens", *(name for name, _, _ in columns(model))]


def layer_lines(model: Inspection) -> list[list[str]]:
    """Return one line of text per layer; "-" where a column does not fit the kind of router."""
    lines = []
    for name, r in model.layers.items():
        slots = r["experts"] * r["slots_per_expert"]
        cells = [name.removeprefix("encoder."), r["router"], str(slots), str(r["tokens"])]
        known = DENSE if r["kind"] == "dense" else SPARSE
        cells += [
            number_cell(get(r), form) if (title, get, form) in known else "-" for title, get, form in columns(model)
        ]
        lines.append(cells)
    return lines


def columns(model: Inspection) -> list[tuple[str, Any, str]]:
    kinds = {r["kind"] for r in model.layers.values()}
    return [*(DENSE if "dense" in kinds else ()), *(SPARSE if "sparse" in kinds else ())]


def number_cell(value: float | None, form: str, factor: float = 1.0) -> str:
    """Format a number for a table; a dash where there is none."""
    return "-" if value is None else format(value * factor, form)


def notes_of(models: Sequence[Inspection]) -> list[tuple[str, str]]:
    """Return what the columns mean that the tables of these models have."""
    shown = {column for model in models for column in header(model)}
    return [note for note in NOTES if note[0].split(", ")[0] in shown]


def layers_text(model: Inspection) -> str:
    """Format the layers of a model as columns under each other: words to the left, numbers to the right."""
    return "\n".join(aligned([header(model), *layer_lines(model)], left=(0, 1)))
