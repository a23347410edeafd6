"""What a model costs, before anything runs: parameters, FLOPs and bytes by formula."""

from softmoe.budget.count import Cost, Part, cost
from softmoe.budget.memory import Memory, memory

__all__ = ["Cost", "Memory", "Part", "cost", "memory"]
