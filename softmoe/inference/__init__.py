"""A trained model becomes a fast one: folded routers, experts in few bits, mapped weights, export and a service.

Names are loaded when first used: the options of `softmoe serve` do without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from softmoe.inference.layers import WEIGHTS, Storage, Weights
    from softmoe.inference.prepared import open_mapped, prepare

__all__ = ["WEIGHTS", "Storage", "Weights", "open_mapped", "prepare"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        home = "prepared" if name in ("open_mapped", "prepare") else "layers"
        return getattr(import_module(f"softmoe.inference.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
