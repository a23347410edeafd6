"""A trained model becomes a fast one: folded routers, experts in few bits, mapped weights, export and a service."""

from softmoe.inference.layers import WEIGHTS, Storage, Weights
from softmoe.inference.prepare import open_mapped, prepare

__all__ = ["WEIGHTS", "Storage", "Weights", "open_mapped", "prepare"]
