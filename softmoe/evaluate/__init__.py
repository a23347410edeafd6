"""Model and data -> named numbers: accuracy, few-shot, nearest neighbors, linear probe, prediction; and with texts
zero-shot, retrieval, search."""

from softmoe.evaluate.api import evaluate, predict
from softmoe.evaluate.classify import Totals, classification, count
from softmoe.evaluate.features import Features, extract
from softmoe.evaluate.fewshot import FewShotResult, few_shot
from softmoe.evaluate.inputs import Loaded, evaluation_transform, find_images, load, open_data
from softmoe.evaluate.prediction import Prediction, Unreadable, predict_files
from softmoe.evaluate.retrieval import retrieve
from softmoe.evaluate.search import search
from softmoe.evaluate.towers import Towers, load_towers
from softmoe.evaluate.zeroshot import zeroshot

__all__ = [
    "Features",
    "FewShotResult",
    "Loaded",
    "Prediction",
    "Totals",
    "Towers",
    "Unreadable",
    "classification",
    "count",
    "evaluate",
    "evaluation_transform",
    "extract",
    "few_shot",
    "find_images",
    "load",
    "load_towers",
    "open_data",
    "predict",
    "predict_files",
    "retrieve",
    "search",
    "zeroshot",
]
