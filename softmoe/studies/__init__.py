"""Experiments that train several runs and compare them: the quickstart, and the paper's studies in `catalog`.

Each command is a frozen dataclass, as in `softmoe.evaluate`: its fields are the options, in Python and on the command
line, and `run` does it. This file loads without torch.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from softmoe.studies.driver import Done, Estimate
    from softmoe.studies.quickstart import Compared, Shown

ScaleName = Literal["tiny", "small", "paper"]


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Show a small trained Soft MoE that comes with the package: what it predicts, and a page of what is inside it."""

    out: Path | None = None
    """New folder for the pictures and the page; softmoe_demo if not given, with a number if there is one."""
    pictures: int = 8
    """Pictures to predict, and to show on the page."""

    def run(self) -> tuple[list[Shown], Path]:
        """Draw pictures, predict them, and write the page; returns both."""
        from softmoe.studies.quickstart import run_demo

        return run_demo(self)


@dataclass(frozen=True, kw_only=True)
class Quickstart:
    """Train a small Soft MoE, one expert with the same slots and a dense twin on drawn characters, and compare them."""

    runs: Path = Path("runs")
    """Folder for the runs. A quickstart that was stopped goes on from there."""
    seed: int = 0
    """The seed of weights and data."""
    tiny: bool = False
    """Two steps each, to see that everything works."""
    jobs: int | None = None
    """Models that train at the same time, a process of one thread each; one a core if not given."""

    def run(self) -> Compared:
        """Train all models, or go on where an earlier call was stopped; writes two pictures and a page."""
        from softmoe.studies.quickstart import run_quickstart

        return run_quickstart(self)


@dataclass(frozen=True, kw_only=True)
class LabOptions:
    """The options that say where a study is done: the size of everything, the data, the seeds."""

    scale: ScaleName = "small"
    """tiny: seconds, on generated images; small: 45 seconds a run on one core; paper: as the paper did it."""
    recipe: str | None = None
    """A recipe whose model, data and settings are studied instead of a scale's, for example quickstart."""
    data: str | None = None
    """Training data: a folder with train/CLASS/* and val/CLASS/*, or a source as in training."""
    transfer: str | None = None
    """Data of other classes: adds the accuracy of 10 images a class on each model's features."""
    seeds: int | None = None
    """Runs of each cell; 3 at scale small, else 1. One seed gives no interval."""
    steps: int | None = None
    """Steps of each run, instead of the scale's."""
    slots: int | None = None
    """Slots of a soft layer, and experts where each has one; if not given those of the recipe, or one a token."""


@dataclass(frozen=True)
class Study(LabOptions):
    """Run one of the paper's experiments: its grid, its figure with the paper's numbers beside, and a verdict."""

    goes_on: ClassVar[bool] = True  # with what is in its folder `out`
    names: tuple[str, ...]
    """Names of studies; `softmoe study` lists them. They share the runs they have in common."""
    _: KW_ONLY
    only: tuple[str, ...] = ()
    """Run only cells with one of these words in a label, such as placed; the table is of all that is done."""
    out: Path = Path("studies")
    """Runs, tables, figures and verdicts go here. What is done already is not done again."""
    jobs: int = 1
    """Runs at the same time, a process of one thread (and one GPU, if there are) each."""
    collect: bool = False
    """Run nothing: write table, figure and verdict of what is done."""
    dry_run: bool = False
    """Print the number of runs, FLOPs and time, and stop."""

    @property
    def is_smoke_test(self) -> bool:
        """Tell if runs are too short to mean anything, so that there is no verdict."""
        return self.scale == "tiny" and self.recipe is None

    def run(self, say: Callable[[str], None] = print) -> Iterator[Done]:
        """Run the studies one after another, up to one that is stopped, and yield the end of each."""
        studies = [find(name) for name in self.names]  # a wrong name is told before torch is loaded

        from softmoe.studies.driver import run_studies

        return run_studies(studies, self, say)

    def estimates(self) -> list[Estimate]:
        """Return what the studies would cost, without running them."""
        studies = [find(name) for name in self.names]

        from softmoe.studies.driver import estimates

        return estimates(studies, self)


def names() -> list[str]:
    """List the studies of the paper."""
    from softmoe.studies import catalog

    return sorted(module.name for module in pkgutil.iter_modules(catalog.__path__))


def about(name: str) -> str:
    """Return the question of a study, from its docstring, which is read and not run."""
    from softmoe.studies import catalog

    text = Path(catalog.__path__[0], f"{name}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(text)) or "").split("\n", 1)[0]


def find(name: str) -> ModuleType:
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f", did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"no study {name!r}{hint} Studies: {', '.join(names())}")
    return importlib.import_module(f"{__name__}.catalog.{name}")
