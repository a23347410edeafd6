"""Faster ways to the same numbers, put on a plain model from outside: one technique a file.

Names are loaded when first used: whoever only builds C++ (`softmoe.accelerate.build`) loads nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from softmoe.accelerate.techniques import Report, Technique, apply, remove

_HOME = dict.fromkeys(("Report", "Technique", "apply", "remove"), "softmoe.accelerate.techniques")

__all__ = ["Report", "Technique", "apply", "remove"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'softmoe.accelerate' has no attribute {name!r}")
