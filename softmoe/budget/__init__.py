"""What a model costs, before anything runs: parameters, FLOPs and bytes by formula."""

from softmoe.budget.count import Cost, Part, cost

__all__ = ["Cost", "Part", "cost"]
