"""One loop from images to a trained model, and nothing lost."""

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
