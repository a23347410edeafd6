"""Many devices, put on from outside: experts owned by ranks, everything else replicated or sharded."""

from softmoe.parallel.apply import apply, check_experts, check_groups, check_model
from softmoe.parallel.mesh import Mesh, Sizes, make_mesh
from softmoe.parallel.reduce import clip_by_global_norm, global_norm, local, mean_over_ranks, sum_over_ranks

__all__ = [
    "Mesh",
    "Sizes",
    "apply",
    "check_experts",
    "check_groups",
    "check_model",
    "clip_by_global_norm",
    "global_norm",
    "local",
    "make_mesh",
    "mean_over_ranks",
    "sum_over_ranks",
]
