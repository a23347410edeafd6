"""Compute what a model costs before anything runs: parameters, FLOPs and bytes by formula."""

from softmoe.budget.count import Cost, Part, cost, text_cost, training_flops
from softmoe.budget.memory import Memory, memory

__all__ = ["Cost", "Memory", "Part", "cost", "memory", "text_cost", "training_flops"]
