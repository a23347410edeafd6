"""A trained model becomes a fast one: folded routers, experts in few bits, mapped weights, export and a service.

Names are loaded when first used: the options of `softmoe serve` do without torch.
"""

from typing import TYPE_CHECKING

from softmoe.lazy import lazy_names

if TYPE_CHECKING:
    from softmoe.inference.layers import WEIGHTS, Storage, Weights
    from softmoe.inference.prepared import open_mapped, prepare

__all__ = ["WEIGHTS", "Storage", "Weights", "open_mapped", "prepare"]

__getattr__, __dir__ = lazy_names(
    __name__, {"layers": ("WEIGHTS", "Storage", "Weights"), "prepared": ("open_mapped", "prepare")}
)
