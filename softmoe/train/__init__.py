"""Train a model from a configuration, with one loop for every task.

Names are loaded when first used: settings and recipes do without torch. The module can be called too:
`softmoe.train("small_data", "photos", steps=300)` trains from a recipe (softmoe/api.py).
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from softmoe.lazy import lazy_names

if TYPE_CHECKING:
    from softmoe.train.config import (
        CheckpointSection,
        DataSection,
        EvaluationSection,
        LogSection,
        ModelSection,
        ObjectiveSection,
        OptimSection,
        ParallelSection,
        ScheduleSection,
        TextSection,
        TrainConfig,
    )
    from softmoe.train.loop import Result, train
    from softmoe.train.reporting import Diverged

_HOMES = {
    "config": (
        "CheckpointSection",
        "DataSection",
        "EvaluationSection",
        "LogSection",
        "ModelSection",
        "ObjectiveSection",
        "OptimSection",
        "ParallelSection",
        "ScheduleSection",
        "TextSection",
        "TrainConfig",
    ),
    "loop": ("Result", "train"),
    "reporting": ("Diverged",),
}

__all__ = [
    "CheckpointSection",
    "DataSection",
    "Diverged",
    "EvaluationSection",
    "LogSection",
    "ModelSection",
    "ObjectiveSection",
    "OptimSection",
    "ParallelSection",
    "Result",
    "ScheduleSection",
    "TextSection",
    "TrainConfig",
    "train",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)


class _CallableModule(ModuleType):
    """A module that can be called; softmoe.api imports this package, so it is imported only when it is called."""

    def __call__(self, *args: Any, **settings: Any) -> "Result":
        return import_module("softmoe.api").train(*args, **settings)


sys.modules[__name__].__class__ = _CallableModule
