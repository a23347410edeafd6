"""Show costs and plans as plain text, at most 100 columns wide, and as JSON-ready values."""

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from softmoe.budget.count import Convention, Cost, cost
from softmoe.budget.paper import (
    MISFITS,
    Comparison,
    LongRun,
    ParetoRun,
    compare_long_runs,
    compare_pareto_runs,
    summary,
)
from softmoe.budget.plan import Hardware, Plan, best_plan
from softmoe.models import TwoTowerConfig, ViTConfig
from softmoe.moe import SparseConfig

WIDTH = 98
SHOWN = 8  # layouts of a plan


def models_report(models: dict[str, ViTConfig | TwoTowerConfig], convention: Convention = "ours") -> str:
    """Show the totals of each model, then its parameters and multiply-accumulates by part."""
    costs = {name: cost(config, convention=convention) for name, config in models.items()}
    images = {name: c.image if isinstance(c, TwoTowerConfig) else c for name, c in models.items()}
    first = next(iter(images.values()))
    height, width = first.image_shape
    classes = "no head" if first.num_classes is None else f"{first.num_classes:,} classes"
    totals = [
        [name, f"{c.params:,}", *(f"{count / 1e9:.3f}" for count in (c.macs, c.forward_flops, c.train_flops))]
        for name, c in costs.items()
    ]
    lines = [
        f"Per image of {height} x {width} pixels, {classes}. FLOPs include elementwise operations;",
        "train is forward and backward, without the optimizer.",
        *(["Of two towers, both are counted: an image and a text of full length."] if images != models else []),
        "",
        *aligned_columns(["model", "parameters", "GMAC", "GFLOP forward", "GFLOP train"], totals),
        "",
        *parts_table("parameters", costs, "params"),
        "",
        *parts_table("GMAC", costs, "macs"),
    ]
    sparse = [name for name, config in images.items() if config.moe and isinstance(config.moe.router, SparseConfig)]
    if sparse and convention == "ours":
        text = "; ".join(f"{name} {cost(models[name], convention='paper').macs / 1e9:.3f} GMAC" for name in sparse)
        lines += [
            "",
            *wrap(f"Rows are moved by index here. With the one-hot products of the paper's dispatcher: {text}."),
        ]
    return "\n".join(lines)


def parts_table(title: str, costs: dict[str, Cost], what: str) -> list[str]:
    show = short_number if what == "params" else (lambda macs: f"{macs / 1e9:.3f}")
    names = list(next(iter(costs.values())).parts)
    rows = [
        [name, *(show(value) if (value := getattr(part, what)) else "-" for part in c.parts.values())]
        for name, c in costs.items()
    ]
    return aligned_columns([title, *names], rows)


def paper_report() -> str:
    """Show the paper's cost columns beside ours: the long runs, all 107 models of the Pareto table, and the misfits."""
    long, pareto = compare_long_runs(), compare_pareto_runs()
    errors = [
        *(["long runs", *line] for line in summary_rows(summary(long))),
        *(["Pareto", *line] for line in summary_rows(summary(pareto))),
        *(["Pareto without [1] [2]", *line] for line in summary_rows(summary(pareto, without_large_misfits=True))),
    ]
    lines = [
        "Long runs (batches of 4,096 images of 224 x 224 pixels, 29,593 classes)",
        "",
        *aligned_columns(
            ["model", "steps", "params", "ours", "GFLOP/img", "ours", "error", "exaFLOP", "ours", "error"],
            [long_row(row) for row in long],
        ),
        "",
        "Pareto table (300,000 steps; a number in brackets is a misfit, see below)",
        "",
        *aligned_columns(
            ["ref", "model", "routing", "experts", "group", "K", "C", "exaFLOP", "ours", "error", ""],
            [pareto_row(row) for row in pareto],
            left=(1, 2, 10),
        ),
        "",
        "Errors of the exaFLOP column, (ours - paper) / paper",
        "",
        *aligned_columns(["table", "routing", "rows", "median |error|", "largest |error|"], errors, left=(0, 1)),
        "",
        "Misfits",
    ]
    for number, misfit in enumerate(MISFITS, 1):
        rows = f" (rows {', '.join(map(str, misfit.refs))})" if misfit.refs else ""
        lines += ["", *wrap(f"[{number}] {misfit.title}{rows}. {misfit.explanation}", indent="    ")]
    notes = (
        "The exaFLOP column is half of the FLOPs of the train step, so in effect one FLOP per multiply-accumulate; "
        "double it to compare with GFLOP/img. Sparse routers are charged for one-hot products there, which the routers "
        "of this package do not make."
    )
    return "\n".join([*lines, "", *wrap(notes)])


def long_row(row: Comparison) -> list[str]:
    run = row.run
    assert isinstance(run, LongRun)
    assert row.gflop_error is not None
    name = f"ViT {run.model}" if run.experts is None else f"{run.routing} {run.model} {run.experts}E"
    return [
        name,
        f"{run.steps // 1_000_000}M",
        run.params,
        short_number(row.params),
        f"{run.gflop:.1f}",
        f"{row.gflop:.2f}",
        f"{row.gflop_error:+z.2%}",
        f"{run.exaflop:.1f}",
        f"{row.exaflop:.1f}",
        f"{row.error:+z.2%}",
    ]


def pareto_row(row: Comparison) -> list[str]:
    run = row.run
    assert isinstance(run, ParetoRun)
    settings = ["-" if value is None else str(value) for value in (run.experts, run.group_size, run.top_k, run.factor)]
    mark = f"[{MISFITS.index(row.misfit) + 1}]" if row.misfit else ""
    numbers = [f"{run.exaflop:.1f}", f"{row.exaflop:.2f}", f"{row.error:+z.2%}"]
    return [str(run.ref), run.model, run.routing, *settings, *numbers, mark]


def summary_rows(errors: dict[str, tuple[int, float, float]]) -> list[list[str]]:
    return [[routing, str(rows), f"{mid:.2%}", f"{top:.2%}"] for routing, (rows, mid, top) in errors.items()]


def paper_values() -> dict[str, Any]:
    """Return as values what `paper_report` says."""

    def values(row: Comparison) -> dict[str, Any]:
        ours = {"params": row.params, "gflop": row.gflop, "exaflop": row.exaflop}
        misfit = row.misfit and row.misfit.title
        return {"paper": asdict(row.run), "ours": ours, "exaflop_error": row.error, "misfit": misfit}

    return {
        "long_runs": [values(row) for row in compare_long_runs()],
        "pareto_runs": [values(row) for row in compare_pareto_runs()],
        "misfits": [asdict(misfit) for misfit in MISFITS],
    }


def aligned_columns(header: list[str], rows: list[list[str]], left: tuple[int, ...] = (0,)) -> list[str]:
    """Format a header, a rule and rows as lines; columns are aligned right, except those in `left`."""
    head, *lines = aligned([header, *rows], left)
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return [head, "-" * (sum(widths) + 2 * (len(widths) - 1)), *lines]


def aligned(lines: Sequence[Sequence[str]], left: tuple[int, ...] = (0,)) -> list[str]:
    """Align the cells of all lines in columns, to the right except those in `left`."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def line(cells: Sequence[str]) -> str:
        pairs = enumerate(zip(cells, widths, strict=True))
        return "  ".join(cell.ljust(w) if index in left else cell.rjust(w) for index, (cell, w) in pairs).rstrip()

    return [line(cells) for cells in lines]


def short_number(number: int) -> str:
    """Shorten 933709471 to "933.7M"."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.2f}{letter}" if letter == "B" else f"{number / size:.1f}{letter}"
    return str(number)


def wrap(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent)


def plan_report(name: str, candidates: list[Plan], hardware: Hardware, most: int | None) -> str:
    best = best_plan(candidates, hardware)
    fitting = [plan for plan in candidates if plan.memory().peak <= hardware.memory]
    first = candidates[0]
    lines = [
        f"{name}: {first.other_params + first.expert_params:,} parameters on {first.layout.world} devices of "
        f"{hardware.memory / 1e9:g} GB, {first.settings.batch} images per step",
        "",
    ]
    if best is None:
        least = min(candidates, key=lambda plan: plan.memory().peak)
        lines += wrap(
            f"No layout fits. The smallest needs {gigabytes(least.memory().peak)} GB per device "
            f"({settings_text(least)}): use more devices, a smaller batch, or fewer experts."
        )
    else:
        lines += [*best_lines(best, hardware), "", f"Layouts that fit: {len(fitting)} of {len(candidates)}"]
        rows = sorted(fitting, key=lambda plan: plan.seconds(hardware))[:SHOWN]
        lines += aligned_columns(
            ["expert", "shard", "recompute", "GB", "ms", "images/s"],
            [
                [
                    str(plan.layout.expert),
                    str(plan.layout.shard),
                    "yes" if plan.settings.checkpointing else "no",
                    gigabytes(plan.memory().peak),
                    f"{plan.seconds(hardware) * 1e3:.1f}",
                    f"{plan.settings.batch / plan.seconds(hardware):,.0f}",
                ]
                for plan in rows
            ],
        )
    if most is not None:
        lines += ["", f"Most experts that fit, in powers of two, sharing the model's slots (one each at least): {most}"]
    return "\n".join([*lines, "", *wrap(assumptions(hardware))])


def best_lines(plan: Plan, hardware: Hardware) -> list[str]:
    need, traffic, times = plan.memory(), plan.traffic(), plan.step_seconds(hardware)
    speed = plan.settings.batch / plan.seconds(hardware)
    return [
        f"Best: {settings_text(plan)}",
        "",
        *aligned_columns(["per device", "GB"], [[kind, gigabytes(size)] for kind, size in asdict(need).items()]),
        "",
        *aligned_columns(
            ["sent per step and device", "MB"], [[k, f"{v / 1e6:,.1f}"] for k, v in asdict(traffic).items()]
        ),
        "",
        *aligned_columns(["step", "ms"], [[kind, f"{seconds * 1e3:.1f}"] for kind, seconds in times.items()]),
        f"together {plan.seconds(hardware) * 1e3:.1f} ms, of which products are {plan.efficiency(hardware):.0%}; "
        f"{speed:,.0f} images/s",
    ]


def settings_text(plan: Plan) -> str:
    text = f"--parallel.expert {plan.layout.expert} --parallel.shard {plan.layout.shard}"
    return text + (" --gradient-checkpointing True" if plan.settings.checkpointing else "")


def assumptions(h: Hardware) -> str:
    return (
        f"Assumed: {h.name}, {h.flops / 1e12:g} TFLOP/s of which steps reach {h.share:.0%}, "
        f"{h.memory_rate / 1e12:g} TB/s memory, nodes of {h.node} with {h.inside / 1e9:g} GB/s inside and "
        f"{h.between / 1e9:g} GB/s per device between them. Gradients come as activations go. All-to-alls are not "
        "hidden; gathers and reductions hide behind products. Not in it: data loading, the allocator's waste, anything "
        "measured."
    )


def plan_values(candidates: list[Plan], hardware: Hardware, most: int | None) -> dict[str, Any]:
    best = best_plan(candidates, hardware)
    return {
        "hardware": asdict(hardware),
        "best": None if best is None else values(best, hardware),
        "fitting": [values(p, hardware) for p in candidates if p.memory().peak <= hardware.memory],
        "most_experts": most,
    }


def values(plan: Plan, hardware: Hardware) -> dict[str, Any]:
    L = plan.layout
    return {
        "layout": {"devices": L.world, "expert": L.expert, "shard": L.shard},
        "settings": asdict(plan.settings),
        "memory": asdict(plan.memory()),
        "traffic": asdict(plan.traffic()),
        "seconds": plan.step_seconds(hardware) | {"step": plan.seconds(hardware)},
        "efficiency": plan.efficiency(hardware),
    }


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f}"
