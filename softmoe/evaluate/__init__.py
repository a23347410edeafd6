"""Model and data -> named numbers: accuracy, few-shot, nearest neighbors, linear probe, prediction."""

from softmoe.evaluate.api import evaluate, predict
from softmoe.evaluate.classify import Totals, classification, count
from softmoe.evaluate.features import Features, extract
from softmoe.evaluate.fewshot import FewShotResult, few_shot
from softmoe.evaluate.inputs import Loaded, evaluation_transform, find_images, load, open_data
from softmoe.evaluate.prediction import Prediction, Unreadable, predict_files

__all__ = [
    "Features",
    "FewShotResult",
    "Loaded",
    "Prediction",
    "Totals",
    "Unreadable",
    "classification",
    "count",
    "evaluate",
    "evaluation_transform",
    "extract",
    "few_shot",
    "find_images",
    "load",
    "open_data",
    "predict",
    "predict_files",
]
