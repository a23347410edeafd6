"""Train a model from a configuration, with one loop for every task.

The module can be called too: `softmoe.train("small_data", "photos", steps=300)` trains from a recipe (softmoe/api.py).
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

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
    TrainConfig,
)
from softmoe.train.loop import Result, train
from softmoe.train.model_section import TextSection
from softmoe.train.reporting import Diverged

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


class _CallableModule(ModuleType):
    """A module that can be called; softmoe.api imports this package, so it is imported only when it is called."""

    def __call__(self, *args: Any, **settings: Any) -> Result:
        return import_module("softmoe.api").train(*args, **settings)


sys.modules[__name__].__class__ = _CallableModule
