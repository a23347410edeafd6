"""Compute what a model costs before anything runs: parameters, FLOPs and bytes by formula."""

from softmoe.budget.count import Cost, Part, cost
from softmoe.budget.memory import Memory, memory
from softmoe.budget.towers import text_cost, training_flops

__all__ = ["Cost", "Memory", "Part", "cost", "memory", "text_cost", "training_flops"]
