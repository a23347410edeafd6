"""Draw the curves of one or several runs, as pictures. Needs matplotlib (the extra `plots`)."""

import io
from pathlib import Path
from typing import Any

from softmoe.report.runs import RunRecord

COLORS = ("#0b6e99", "#d1495b", "#66a182", "#edae49", "#6a4c93", "#444444")


def comparison(runs: list[RunRecord]) -> Any:
    """Draw validation accuracy against computation and against time, and training loss against images."""
    figure, axes = pyplot().subplots(1, 3, figsize=(13, 3.9))
    panels = (
        ("flops", "val/top1", 1e-12, 100.0, "training TFLOPs", "validation top-1 (%)"),
        ("device_seconds", "val/top1", 1.0, 100.0, "training seconds", "validation top-1 (%)"),
        ("images", "loss", 1e-3, 1.0, "thousand images seen", "training loss"),
    )
    for axis, (x, y, x_factor, y_factor, x_label, y_label) in zip(axes, panels, strict=True):
        for run, color in zip(runs, COLORS * (1 + len(runs) // len(COLORS)), strict=False):
            xs, ys = run.curve(x, y)
            mark = "o" if y.startswith("val") else None
            axis.plot(
                [a * x_factor for a in xs], [b * y_factor for b in ys], color=color, marker=mark, ms=4, label=run.name
            )
        finish(axis, x_label, y_label)
    axes[0].legend(frameon=False)
    figure.tight_layout()
    return figure


def router_health(run: RunRecord) -> Any | None:
    """Draw scale and sharpness of each soft layer over the run; None where there is none."""
    panels = [
        (run.routers(key), label)
        for key, label in (
            ("scale", "scale of the logits"),
            ("max_dispatch", "largest dispatch weight (mean over slots)"),
            ("max_combine", "largest combine weight (mean over tokens)"),
            ("drop_rate", "share of tokens dropped"),
        )
    ]
    panels = [(curves, label) for curves, label in panels if curves]
    if not panels:
        return None
    figure, axes = pyplot().subplots(1, len(panels), figsize=(4.3 * len(panels), 3.4), squeeze=False)
    for axis, (curves, label) in zip(axes[0], panels, strict=True):
        for (layer, (steps, values)), color in zip(curves.items(), COLORS * (1 + len(curves) // 6), strict=False):
            axis.plot(steps, values, color=color, label=layer.removeprefix("encoder.").removesuffix(".mlp"))
        finish(axis, "step", label)
    axes[0][0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    return figure


def finish(axis: Any, x_label: str, y_label: str) -> None:
    axis.set(xlabel=x_label, ylabel=y_label)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


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


def pyplot() -> Any:
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ValueError("pictures need matplotlib: pip install softmoe[plots]") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
