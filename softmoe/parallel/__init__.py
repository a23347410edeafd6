"""Put many devices on from outside: experts owned by ranks, everything else replicated or sharded."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from softmoe.parallel.mesh import Mesh, Sizes, make_mesh
    from softmoe.parallel.reduce import (
        clip_by_global_norm,
        global_norm,
        local,
        local_shard,
        mean_over_ranks,
        sum_over_ranks,
        whole,
    )
    from softmoe.parallel.spread import apply, building, check_experts, check_groups, check_model

__all__ = [
    "Mesh",
    "Sizes",
    "apply",
    "building",
    "check_experts",
    "check_groups",
    "check_model",
    "clip_by_global_norm",
    "global_norm",
    "local",
    "local_shard",
    "make_mesh",
    "mean_over_ranks",
    "sum_over_ranks",
    "whole",
]
_HOMES = {
    "softmoe.parallel.spread": ("apply", "building", "check_experts", "check_groups", "check_model"),
    "softmoe.parallel.mesh": ("Mesh", "Sizes", "make_mesh"),
    "softmoe.parallel.reduce": (
        "clip_by_global_norm",
        "global_norm",
        "local",
        "local_shard",
        "mean_over_ranks",
        "sum_over_ranks",
        "whole",
    ),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import on first use: torch's distributed tensors take a second, and one process does not need them."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value
