"""Look inside a model without touching it: what its routers decide, as numbers, figures and a page."""

from softmoe.inspection.collect import Inspection, layer_results
from softmoe.inspection.statistics import correlation_summary, slot_correlation
from softmoe.moe.record import Recording, record

__all__ = ["Inspection", "Recording", "correlation_summary", "layer_results", "record", "slot_correlation"]
