"""A trained model -> a fast one: folded routers, experts in few bits, models larger than memory, export, service."""

from softmoe.inference.packed import WEIGHTS, Weights
from softmoe.inference.prepare import prepare

__all__ = ["WEIGHTS", "Weights", "prepare"]
