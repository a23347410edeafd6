"""Read what a training run left behind: settings and metrics."""

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
        """Two columns of the rows that have both."""
        pairs = [(row[x], row[y]) for row in self.rows if row.get(x) is not None and row.get(y) is not None]
        return [a for a, _ in pairs], [b for _, b in pairs]

    def last(self, key: str) -> Any:
        """The newest value, or None."""
        return next((row[key] for row in reversed(self.rows) if row.get(key) is not None), None)

    def routers(self, key: str) -> dict[str, tuple[list[int], list[float]]]:
        """For each MoE layer the steps and values of one figure of its health (scale, max_dispatch, ...)."""
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
