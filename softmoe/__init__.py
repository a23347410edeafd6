"""Soft Mixture-of-Experts vision transformers: exact, fast, complete.

Names are loaded when first used, so that `import softmoe` and the command line start at once.
"""

# ruff: noqa: E402  # a Ctrl-C is answered before the imports that take time

import os
import signal
import sys


def _is_command(words: list[str]) -> bool:
    """Tell if these words started Python as the command `softmoe` or as `python -m softmoe`."""
    for word, following in zip(words[1:], [*words[2:], ""], strict=False):
        if word == "-m" or not word.startswith("-"):
            return (following if word == "-m" else os.path.basename(word).removesuffix(".exe")) == "softmoe"
    return False


if _is_command(sys.orig_argv) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C before main() runs: the end, without a traceback

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from softmoe.machine import prepare_environment

prepare_environment()  # before anything loads torch

__version__ = "0.1.0"

if TYPE_CHECKING:
    from softmoe.api import finetune
    from softmoe.budget import cost
    from softmoe.convert import from_pretrained
    from softmoe.evaluate import fewshot, predict
    from softmoe.models import create_model, list_models
    from softmoe.moe import SoftMoE
    from softmoe.storage import hub, save_pretrained
    from softmoe.storage.hub import push_to_hub
    from softmoe.transfer import upcycle, upcycle_

_HOME = {
    "SoftMoE": "softmoe.moe",
    "create_model": "softmoe.models",
    "list_models": "softmoe.models",
    "cost": "softmoe.budget",
    "upcycle": "softmoe.transfer",
    "upcycle_": "softmoe.transfer",
    "finetune": "softmoe.api",
    "fewshot": "softmoe.evaluate",
    "predict": "softmoe.evaluate",
    "from_pretrained": "softmoe.convert",
    "hub": "softmoe.storage",
    "push_to_hub": "softmoe.storage.hub",
    "save_pretrained": "softmoe.storage",
}
_ROOMS = tuple(module.name for module in iter_modules(__path__) if module.ispkg)

__all__ = [
    "SoftMoE",
    "cost",
    "create_model",
    "fewshot",
    "finetune",
    "from_pretrained",
    "hub",
    "list_models",
    "predict",
    "push_to_hub",
    "save_pretrained",
    "upcycle",
    "upcycle_",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name in _ROOMS:
        return import_module(f"softmoe.{name}")
    raise AttributeError(f"module 'softmoe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME, *_ROOMS])
