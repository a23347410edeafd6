"""Spread a model over many devices from outside: experts owned by ranks, everything else replicated or sharded.

Names are loaded when first used: torch's distributed tensors take a second, and one process does not need them.
"""

from typing import TYPE_CHECKING

from softmoe.lazy import lazy_names

if TYPE_CHECKING:
    from softmoe.parallel.reduce import (
        clip_by_global_norm,
        global_norm,
        local,
        local_shard,
        mean_over_ranks,
        sum_over_ranks,
        whole,
    )
    from softmoe.parallel.spread import (
        Layout,
        Mesh,
        apply,
        building,
        check_groups,
        check_model,
        make_mesh,
        reduce_gradients,
    )

_HOMES = {
    "reduce": (
        "clip_by_global_norm",
        "global_norm",
        "local",
        "local_shard",
        "mean_over_ranks",
        "sum_over_ranks",
        "whole",
    ),
    "spread": ("Layout", "Mesh", "apply", "building", "check_groups", "check_model", "make_mesh", "reduce_gradients"),
}

__all__ = [
    "Layout",
    "Mesh",
    "apply",
    "building",
    "check_groups",
    "check_model",
    "clip_by_global_norm",
    "global_norm",
    "local",
    "local_shard",
    "make_mesh",
    "mean_over_ranks",
    "reduce_gradients",
    "sum_over_ranks",
    "whole",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
