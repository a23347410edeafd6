"""Other people's weights -> ours, and back; dense models -> models with experts."""

from softmoe.convert.timm import from_timm
from softmoe.convert.upcycle import Upcycled, upcycle
from softmoe.convert.upcycle_distance import Distance, distance
from softmoe.convert.vit import from_vit
from softmoe.convert.vmoe import from_vmoe, to_vmoe

__all__ = ["Distance", "Upcycled", "distance", "from_timm", "from_vit", "from_vmoe", "to_vmoe", "upcycle"]
