"""Read the settings and metrics that a training run left behind, and draw its curves (with the extra `plots`)."""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from softmoe.models import ViTConfig
from softmoe.storage.files import read_json
from softmoe.train import TrainConfig
from softmoe.train.log import scan_metrics


@dataclass(frozen=True)
class RunRecord:
    """One run. `rows` are the lines of metrics.jsonl, those of training and of evaluations, in order."""

    name: str
    folder: Path
    config: TrainConfig
    classes: int
    rows: tuple[dict[str, Any], ...]
    damaged: int = 0
    """Lines of metrics.jsonl that cannot be read."""

    @property
    def model(self) -> ViTConfig:
        return self.config.model.resolve(self.classes or None, self.config.data.transform.image_size)

    def curve(self, x: str, y: str) -> tuple[list[float], list[float]]:
        """Return two columns of the rows that have both."""
        pairs = [(row[x], row[y]) for row in self.rows if row.get(x) is not None and row.get(y) is not None]
        return [a for a, _ in pairs], [b for _, b in pairs]

    def last(self, key: str) -> Any:
        """Return the newest value, or None."""
        return next((row[key] for row in reversed(self.rows) if row.get(key) is not None), None)

    def routers(self, key: str) -> dict[str, tuple[list[int], list[float]]]:
        """Return for each MoE layer the steps and values of one figure of its health (scale, max_dispatch, ...)."""
        curves: dict[str, tuple[list[int], list[float]]] = {}
        for row in self.rows:
            for layer, health in row.get("routers", {}).items():
                if health.get(key) is not None:
                    steps, values = curves.setdefault(layer, ([], []))
                    steps.append(row["step"])
                    values.append(health[key])
        return curves


def load_run(folder: Path | str) -> RunRecord:
    folder = Path(folder)
    settings, metrics = folder / "config.json", folder / "metrics.jsonl"
    for path in (settings, metrics):
        if not path.is_file():
            raise ValueError(f"{folder} is not the folder of a run: it has no {path.name}")
    stored = read_json(settings)
    rows, damaged = scan_metrics(metrics)
    try:
        config, classes = TrainConfig.from_dict(stored["train"]), int(stored["facts"]["classes"])
    except (AttributeError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{settings} is not the config.json of a training run") from error
    return RunRecord(folder.resolve().name, folder, config, classes, tuple(rows), damaged)


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
        raise ValueError("pictures need matplotlib: pip install softmoe-vit[plots]") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
