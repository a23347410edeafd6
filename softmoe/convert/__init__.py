"""Turn the weights of other libraries into models of ours, and back."""

from softmoe.convert.foreign import from_pretrained
from softmoe.convert.timm import from_timm, to_timm
from softmoe.convert.vit import from_vit
from softmoe.convert.vmoe import from_vmoe, to_vmoe

__all__ = ["from_pretrained", "from_timm", "from_vit", "from_vmoe", "to_timm", "to_vmoe"]
