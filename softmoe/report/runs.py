"""Read the settings and metrics that training runs left behind, and show them: curves, tables, one self-contained page.

Curves need the extra `plots`. Few-shot accuracies, inspection figures and mistakes come into the page from files that
other commands left in a run's folder (`softmoe train` leaves the mistakes):

    softmoe fewshot RUN DATA --out RUN/fewshot.json
    softmoe inspect RUN DATA
"""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2

from softmoe.budget import cost
from softmoe.budget.report import aligned
from softmoe.evaluate.mistakes import mistakes_section
from softmoe.inspection.page import number_cell
from softmoe.inspection.plots import finish, legend, panels, pyplot
from softmoe.models import MoEConfig, TwoTowerConfig
from softmoe.moe import SoftConfig
from softmoe.storage.architecture import parse_architecture, split_architecture
from softmoe.storage.files import read_json, write_text
from softmoe.storage.pages import data_address, render
from softmoe.storage.settings import flatten
from softmoe.train.folder import RunFolder, RunRecord

COLORS = ("#0b6e99", "#d1495b", "#66a182", "#edae49", "#6a4c93", "#444444")
COLUMNS = (
    "run",
    "parameters",
    "MFLOP/image",
    "steps",
    "images",
    "TFLOP",
    "seconds",
    "best {} %",
    "last {} %",
    "top-5 %",
    "loss",
)


def comparison(runs: list[RunRecord]) -> Any:
    """Draw validation accuracy against computation and against time, and training loss against images."""
    figure, (axes,) = panels(1, 3, 13 / 3, 4.2)
    accuracy = f"validation {accuracy_name(runs)} (%)"
    shown = (
        ("flops", "val/top1", 1e-12, 100.0, "training TFLOPs", accuracy),
        ("device_seconds", "val/top1", 1.0, 100.0, "training seconds", accuracy),
        ("images", "loss", 1e-3, 1.0, "thousand images seen", "training loss"),
    )
    for axis, (x, y, x_factor, y_factor, x_label, y_label) in zip(axes, shown, strict=True):
        for run, color in zip(runs, COLORS * (1 + len(runs) // len(COLORS)), strict=False):
            xs, ys = run.curve(x, y)
            mark = "o" if y.startswith("val") else None
            axis.plot(
                [a * x_factor for a in xs], [b * y_factor for b in ys], color=color, marker=mark, ms=4, label=run.name
            )
        finish(axis, x_label, y_label)
        axis.locator_params(axis="x", nbins=5)  # labels such as 0.0025 are wide
    legend(axes[0])
    return figure


def router_health(run: RunRecord) -> Any | None:
    """Draw scale and sharpness of each soft layer over the run; None where there is none."""
    shown = [
        (run.routers(key), label)
        for key, label in (
            ("scale", "scale of the logits"),
            ("max_dispatch", "largest dispatch weight\n(mean over slots)"),
            ("max_combine", "largest combine weight\n(mean over tokens)"),
            ("drop_rate", "share of tokens dropped"),
        )
    ]
    shown = [(curves, label) for curves, label in shown if curves]
    if not shown:
        return None
    figure, axes = panels(1, len(shown), 4.3, 3.6)
    for axis, (curves, label) in zip(axes[0], shown, strict=True):
        for (layer, (steps, values)), color in zip(curves.items(), COLORS * (1 + len(curves) // 6), strict=False):
            axis.plot(steps, values, color=color, label=layer.removeprefix("encoder.").removesuffix(".mlp"))
        finish(axis, "step", label)
    legend(axes[0][0])
    return figure


def save_png(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot().close(figure)
    return path


def as_svg(figure: Any) -> str:
    """Return the figure as text to stand inside a page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    pyplot().close(figure)
    return buffer.getvalue().split("?>", 1)[-1].split('dtd">', 1)[-1]


def write_report(
    runs: list[RunRecord],
    path: Path,
    *,
    title: str | None = None,
    lead: tuple[str, ...] = (),
    figures: tuple[tuple[str, Any], ...] = (),
) -> Path:
    """Write the page. Without a `lead` it begins with what slots and experts give.

    `figures` are (title, drawing) pairs that come first. Names come from files: all are escaped.
    """
    health = [(run.name, router_health(run)) for run in runs]
    text = render(
        "softmoe.report",
        "page.html",
        title=title or "Runs: " + ", ".join(run.name for run in runs),
        lead=lead or gains(runs),
        names=[run.name for run in runs],
        summary=summary_table(runs),
        refitted=refitted_heads(runs),
        curves=as_svg(comparison(runs)),
        differences=differences(runs) if len(runs) > 1 else [],
        figures=[(name, as_svg(figure)) for name, figure in figures],
        health=[(name, as_svg(figure)) for name, figure in health if figure is not None],
        fewshot=fewshot_table(runs),
        mistakes=[(run.name, section) for run in runs if (section := mistakes_of(run))],
        inside=[(run.name, found) for run in runs if (found := inspection_figures(run))],
        folders=[(run.name, str(run.folder)) for run in runs],
    )
    return write_text(path, text)


def gains(runs: list[RunRecord]) -> list[str]:
    """Say what slots and experts give if there are runs with soft experts, with one expert and without any.

    If the run with one expert and the same slots is missing, the sentence says so.
    """
    told = []
    for run in runs:
        beside = [other for other in runs if other.config.data.train == run.config.data.train]
        dense = best([other for other in beside if not other.model.moe_blocks and other.model.merge is None])
        layer = soft_layer(run)
        if layer is None or layer.num_experts == 1 or dense is None or best([run]) is None:
            continue
        assert isinstance(layer.router, SoftConfig)
        slots = layer.num_experts * layer.router.slots_per_expert
        control = replace(layer, router=replace(layer.router, num_experts=1, slots_per_expert=slots))
        one = best([other for other in beside if soft_layer(other) == control])
        if one is None:
            told.append(
                f"What experts give is not known: no run has one expert with the slots of {run.name} "
                f"(--model.num-experts 1 --model.slots-per-expert {slots})."
            )
        else:
            told += [f"What slots give: {lead(one, dense)}.", f"What experts give: {lead(run, one)}."]
        shares = [(dense.last(key) or 0.0) / (run.last(key) or 1.0) for key in ("flops", "device_seconds")]
        cost_of = f"{dense.name} had {shares[0]:.2f} times the FLOPs and {shares[1]:.2f} times the seconds"
        told.append(f"All of it: {lead(run, dense)}; {cost_of}.")
    return told


def soft_layer(run: RunRecord) -> MoEConfig | None:
    """Return the layer of a run with a soft router, with its blocks by number; None of other runs."""
    moe, blocks = run.model.moe, run.model.moe_blocks
    if moe is None or not blocks or not isinstance(moe.router, SoftConfig):
        return None
    return replace(moe, blocks=tuple(blocks))


def best(runs: list[RunRecord]) -> RunRecord | None:
    """Return the run with the highest validation accuracy at its end, if any has one."""
    return max(
        (run for run in runs if run.last("val/top1") is not None), key=lambda r: r.last("val/top1"), default=None
    )


def lead(first: RunRecord, second: RunRecord) -> str:
    levels = [100 * run.last("val/top1") for run in (first, second)]
    return (
        f"{levels[0] - levels[1]:+.1f} points top-1 ({first.name} {levels[0]:.1f} %, {second.name} {levels[1]:.1f} %)"
    )


def accuracy_name(runs: list[RunRecord]) -> str:
    """Return what val/top1 counts: classes, or in runs with texts the images and captions that find each other."""
    return "pairs matched" if all(run.config.text.size is not None for run in runs) else "top-1"


def towers_of(run: RunRecord) -> TwoTowerConfig | None:
    """Return the towers of a run with texts, with the vocabulary as learned if there is a checkpoint; else None."""
    text = run.config.text
    if text.size is None:
        return None
    try:
        found = read_json(RunFolder(run.folder).chosen_checkpoint() / "config.json")
        return split_architecture(parse_architecture(found))[1]
    except ValueError:
        image = run.config.model.resolve(None, run.config.data.transform.image_size)
        return text.resolve(image, text.vocab_size)


def summary_table(runs: list[RunRecord]) -> list[tuple[str, ...]]:
    """Return a header and a line per run, as text. Of two towers the FLOPs are those of an image and its text."""
    lines: list[tuple[str, ...]] = [tuple(column.format(accuracy_name(runs)) for column in COLUMNS)]
    for run in runs:
        price = cost(towers_of(run) or run.model)
        lines.append(
            (
                run.name,
                f"{price.params:,}",
                f"{price.forward_flops / 1e6:.1f}",
                number_cell(run.last("step"), ",.0f"),
                number_cell(run.last("images"), ",.0f"),
                number_cell(run.last("flops"), ",.1f", 1e-12),
                number_cell(run.last("device_seconds"), ",.0f"),
                number_cell(max(run.curve("step", "val/top1")[1], default=None), ".2f", 100),
                number_cell(run.last("val/top1"), ".2f", 100),
                number_cell(run.last("val/top5"), ".2f", 100),
                number_cell(run.last("val/loss"), ".3f"),
            )
        )
    return lines


def refitted_heads(runs: list[RunRecord]) -> list[str]:
    """Say what the models reach that got a head in closed form after their runs, which no line of metrics shows."""
    told = []
    for run in runs:
        try:
            made = read_json(run.folder / "model" / "config.json")["provenance"]
            top1, loss = (made["results"][key] for key in ("val/top1", "val/loss"))
            if made["head"]["blocks"]:
                told.append(
                    f"The model of {run.name} has a head in closed form: top-1 {top1:.2%}, loss {loss:.3f}. Table and "
                    "curves are of the head it was trained with."
                )
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # no saved model yet, or another program's
    return told


def differences(runs: list[RunRecord]) -> list[tuple[str, ...]]:
    """List the settings in which the runs differ, their places aside: a line a key, a column a run."""
    settings = [flatten(run.config.to_dict()) for run in runs]
    keys = dict.fromkeys(key for own in settings for key in own if key not in ("run_name", "runs"))
    lines = [(key, *(own.get(key) for own in settings)) for key in keys]
    return [
        (key, *("-" if value is None else str(value) for value in values))
        for key, *values in lines
        if any(value != values[0] for value in values)
    ]


def table_text(lines: list[tuple[str, ...]]) -> str:
    """Format a table of text: the first column to the left, numbers to the right."""
    return "\n".join(aligned(lines))


def fewshot_table(runs: list[RunRecord]) -> list[tuple[str, ...]]:
    """Return a header and a line per run; a column per data set and number of shots. Empty if no run has any."""
    found = {run.name: accuracies(run.folder / "fewshot.json") for run in runs}
    columns = list(dict.fromkeys(column for numbers in found.values() for column in numbers))
    if not columns:
        return []
    lines = [tuple(f"{100 * numbers[c]:.2f}" if c in numbers else "-" for c in columns) for numbers in found.values()]
    header = ("run", *(f"{name}, {shots}-shot %" for name, shots in columns))
    return [header, *((name, *line) for name, line in zip(found, lines, strict=True))]


def accuracies(path: Path) -> dict[tuple[str, str], float]:
    """Read {(data set, shots): mean accuracy over the seeds}; empty where there is no such file, or it is another's."""
    try:
        by_data: dict[str, Any] = read_json(path)["fewshot"]["accuracies"]
        return {(n, shots): sum(values) / len(values) for n, by in by_data.items() for shots, values in by.items()}
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        return {}


def mistakes_of(run: RunRecord) -> str:
    """Return the confusions, classes and worst images of a run from its evaluation.json; empty where there is none."""
    try:
        return mistakes_section(read_json(run.folder / "evaluation.json"))
    except (ValueError, KeyError, TypeError, AttributeError, jinja2.TemplateError):
        return ""


def inspection_figures(run: RunRecord) -> list[tuple[str, str]]:
    """List (name, data URI) of each PNG in the run's figures/."""
    paths = sorted((run.folder / "figures").glob("*.png"))
    return [(path.stem.replace("_", " "), data_address(path.read_bytes())) for path in paths]
