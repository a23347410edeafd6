"""Look inside a model without touching it: what its routers decide, as numbers, figures and a page.

Names are loaded when first used: the options of the commands do without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from softmoe.inspection.api import Doctor, Inspect
    from softmoe.inspection.collect import Inspection, layer_results
    from softmoe.inspection.statistics import correlation_summary, slot_correlation
    from softmoe.moe.record import Recording, record

_HOMES = {
    "softmoe.inspection.api": ("Doctor", "Inspect"),
    "softmoe.inspection.collect": ("Inspection", "layer_results"),
    "softmoe.inspection.statistics": ("correlation_summary", "slot_correlation"),
    "softmoe.moe.record": ("Recording", "record"),
}

__all__ = [
    "Doctor",
    "Inspect",
    "Inspection",
    "Recording",
    "correlation_summary",
    "layer_results",
    "record",
    "slot_correlation",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'softmoe.inspection' has no attribute {name!r}")
