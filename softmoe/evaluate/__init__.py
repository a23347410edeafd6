"""Model and data -> named numbers: accuracy, few-shot, nearest neighbors, linear probe, prediction; and with texts
zero-shot, retrieval, search."""

from softmoe.evaluate.api import Evaluate, FewShot, Predict, evaluate, fewshot, predict
from softmoe.evaluate.classify import Prediction, Unreadable, classification, count
from softmoe.evaluate.features import Features, extract
from softmoe.evaluate.fewshot import FewShotResult, few_shot
from softmoe.evaluate.inputs import Loaded, evaluation_transform, find_images, load
from softmoe.evaluate.search import Search, search
from softmoe.evaluate.towers import Retrieve, Towers, ZeroShot, load_towers, retrieve, zeroshot
from softmoe.models.classification import Totals

__all__ = [
    "Evaluate",
    "Features",
    "FewShot",
    "FewShotResult",
    "Loaded",
    "Predict",
    "Prediction",
    "Retrieve",
    "Search",
    "Totals",
    "Towers",
    "Unreadable",
    "ZeroShot",
    "classification",
    "count",
    "evaluate",
    "evaluation_transform",
    "extract",
    "few_shot",
    "fewshot",
    "find_images",
    "load",
    "load_towers",
    "predict",
    "retrieve",
    "search",
    "zeroshot",
]
