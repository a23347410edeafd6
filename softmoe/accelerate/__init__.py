"""Faster ways to the same numbers, put on a plain model from outside: one technique a file.

Names are loaded when first used: whoever only builds C++ (`softmoe.accelerate.build`) loads nothing else.
"""

from typing import TYPE_CHECKING

from softmoe.lazy import lazy_names

if TYPE_CHECKING:
    from softmoe.accelerate.techniques import Report, Technique, apply, remove

__all__ = ["Report", "Technique", "apply", "remove"]

__getattr__, __dir__ = lazy_names(__name__, {"techniques": ("Report", "Technique", "apply", "remove")})
