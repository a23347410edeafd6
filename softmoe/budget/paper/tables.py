"""Read the paper's tables as they are printed, and the models behind their rows.

Every row is a name and arguments for `create_model`. The classes are the 29,593 of JFT-4B, images have 224 pixels, and
a Soft MoE has one slot per expert: the tables do not say the last, but it is what their cost columns need.
"""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, TypeVar

from softmoe.models import ViTConfig, model_config

T = TypeVar("T")
CLASSES = 29_593
BATCH = 4096
PARETO_STEPS = 300_000
ROUTING = {"Dense": "vit", "Soft MoE": "soft", "Tokens Choice": "tokens_choice", "Experts Choice": "experts_choice"}


@dataclass(frozen=True)
class LongRun:
    """A row of the two long-run tables; `params` as printed ("1.8B"), `exaflop` for the whole run."""

    model: str
    routing: str
    experts: int | None
    steps: int
    params: str
    gflop: float
    exaflop: float


@dataclass(frozen=True)
class ParetoRun:
    """A row of the table of 107 models. `factor` is the capacity factor C; `top_k` its K."""

    ref: int
    model: str
    routing: str
    experts: int | None
    group_size: int | None
    top_k: int | None
    factor: float | None
    exaflop: float


def read_table(name: str) -> list[dict[str, str]]:
    """Read one of the paper's tables by its file name without the ending: a dict per row, digits as printed."""
    folder = files("softmoe.budget.paper")
    path = folder / f"{name}.csv"
    if not path.is_file():
        names = sorted(file.name[:-4] for file in folder.iterdir() if file.name.endswith(".csv"))
        raise ValueError(f"unknown table {name!r}, the paper's tables are: {', '.join(names)}")
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def long_runs() -> list[LongRun]:
    """Read 25 rows: 8 of the main text, 17 of the appendix; some stand in both."""
    return [
        LongRun(
            model=row["backbone"],
            routing=row["routing"],
            experts=optional(int, row["experts"]),
            steps=steps(row["train_steps"]),
            params=row["params"],
            gflop=float(row["eval_gflop_per_img"]),
            exaflop=float(row["train_exaflop"]),
        )
        for table in ("long_runs", "long_runs_upstream")
        for row in read_table(table)
    ]


def pareto_runs() -> list[ParetoRun]:
    return [
        ParetoRun(
            ref=int(row["ref"]),
            model=row["model"],
            routing=row["routing"],
            experts=optional(int, row["experts"]),
            group_size=optional(int, row["group_size"]),
            top_k=optional(int, row["k"]),
            factor=optional(float, row["c"]),
            exaflop=float(row["train_exaflop"]),
        )
        for row in read_table("pareto_runs")
    ]


def long_run_config(run: LongRun) -> ViTConfig:
    return model_config(model_name(run.model, run.routing, run.experts), num_classes=CLASSES)


def pareto_config(run: ParetoRun) -> ViTConfig:
    name, arguments = pareto_arguments(run)
    return model_config(name, **arguments)


def pareto_arguments(run: ParetoRun) -> tuple[str, dict[str, Any]]:
    """Return what to give to `create_model` to get the model of this row."""
    arguments: dict[str, Any] = {"num_classes": CLASSES}
    if run.routing in ("Tokens Choice", "Experts Choice"):
        arguments |= {"group_size": run.group_size, "capacity_factor": run.factor}
    if run.routing == "Tokens Choice":
        arguments["top_k"] = run.top_k
    return model_name(run.model, run.routing, run.experts), arguments


def model_name(backbone: str, routing: str, experts: int | None) -> str:
    """Turn ("S/16", "Soft MoE", 128) into "soft_s16_128e"."""
    name = f"{ROUTING[routing]}_{backbone.replace('/', '').lower()}"
    return name if experts is None else f"{name}_{experts}e"


def steps(text: str) -> int:
    return int(text[:-1]) * {"k": 1_000, "M": 1_000_000}[text[-1]]


def optional(kind: Callable[[str], T], text: str) -> T | None:
    return kind(text) if text else None
