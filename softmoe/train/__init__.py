"""One loop from images to a trained model, and nothing lost.

The room itself can be called: `softmoe.train("small_data", "photos", steps=300)` trains from a recipe (softmoe/api.py).
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


class _Room(ModuleType):
    """This room, which can be called; what the call does stands above it, so it is named and not imported."""

    def __call__(self, *args: Any, **settings: Any) -> Result:
        return import_module("softmoe.api").train(*args, **settings)


sys.modules[__name__].__class__ = _Room
