"""One loop from images to a trained model, and nothing lost."""

from softmoe.train.config import (
    CheckpointSection,
    DataSection,
    EvaluationSection,
    LogSection,
    ModelSection,
    ObjectiveSection,
    OptimSection,
    ScheduleSection,
    TrainConfig,
)
from softmoe.train.loop import Diverged, Result, train

__all__ = [
    "CheckpointSection",
    "DataSection",
    "Diverged",
    "EvaluationSection",
    "LogSection",
    "ModelSection",
    "ObjectiveSection",
    "OptimSection",
    "Result",
    "ScheduleSection",
    "TrainConfig",
    "train",
]
