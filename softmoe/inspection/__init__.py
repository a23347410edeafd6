"""Look inside a model without touching it: what its routers decide, as numbers, figures and a page.

Names are loaded when first used: the options of the commands do without torch.
"""

from typing import TYPE_CHECKING

from softmoe.lazy import lazy_names

if TYPE_CHECKING:
    from softmoe.inspection.api import Doctor, Inspect
    from softmoe.inspection.collect import Inspection, layer_results
    from softmoe.inspection.statistics import correlation_summary, slot_correlation
    from softmoe.moe.record import Recording, record

_HOMES = {
    "api": ("Doctor", "Inspect"),
    "collect": ("Inspection", "layer_results"),
    "statistics": ("correlation_summary", "slot_correlation"),
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

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
