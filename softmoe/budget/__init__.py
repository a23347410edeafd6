"""Compute what a model costs before anything runs: parameters, FLOPs and bytes by formula."""

from softmoe.budget.count import Cost, Part, cost, text_cost, training_flops
from softmoe.budget.memory import Memory, blocks_to_recompute, memory

__all__ = ["Cost", "Memory", "Part", "blocks_to_recompute", "cost", "memory", "text_cost", "training_flops"]
