"""Put many devices on from outside: experts owned by ranks, everything else replicated or sharded."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    """Import on first use: torch's distributed tensors take a second, and one process does not need them."""
    if name in __all__:
        for home in ("reduce", "spread"):  # the quick one first
            module = import_module(f"softmoe.parallel.{home}")
            if hasattr(module, name):
                return globals().setdefault(name, getattr(module, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
