"""Evaluate a model on data: accuracy, few-shot, probes, prediction, and with texts zero-shot, retrieval and search.

Names are loaded when first used: the options of the commands do without torch. The package itself can be called:
`softmoe.evaluate(MODEL, DATA)` is `softmoe.evaluate.evaluate`.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from softmoe.lazy import lazy_names

if TYPE_CHECKING:
    from softmoe.evaluate.api import (
        Evaluate,
        FewShot,
        Predict,
        Retrieve,
        Search,
        ZeroShot,
        evaluate,
        fewshot,
        predict,
        retrieve,
        search,
        zeroshot,
    )
    from softmoe.evaluate.classify import Prediction, Unreadable, classification, count
    from softmoe.evaluate.features import Features, extract
    from softmoe.evaluate.inputs import Loaded, evaluation_transform, find_images, load
    from softmoe.evaluate.ridge import FewShotResult, few_shot
    from softmoe.evaluate.towers import Towers, load_towers
    from softmoe.models.classification import Totals

_API = ("Evaluate", "FewShot", "Predict", "Retrieve", "Search", "ZeroShot")
_HOMES = {
    "api": (*_API, *map(str.lower, _API)),
    "classify": ("Prediction", "Unreadable", "classification", "count"),
    "features": ("Features", "extract"),
    "ridge": ("FewShotResult", "few_shot"),
    "inputs": ("Loaded", "evaluation_transform", "find_images", "load"),
    "towers": ("Towers", "load_towers"),
    "softmoe.models.classification": ("Totals",),
}

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

__getattr__, __dir__ = lazy_names(__name__, _HOMES)


class _CallableModule(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> dict[str, Any]:
        return self.evaluate(*args, **options)


sys.modules[__name__].__class__ = _CallableModule
