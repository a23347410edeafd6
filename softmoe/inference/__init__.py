"""A trained model -> a fast one: folded routers, experts in few bits, models larger than memory, export, service."""

from softmoe.inference.mapped import open_mapped
from softmoe.inference.packed import WEIGHTS, Storage, Weights
from softmoe.inference.prepare import prepare

__all__ = ["WEIGHTS", "Storage", "Weights", "open_mapped", "prepare"]
