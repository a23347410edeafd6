"""Other people's weights -> ours, and back."""

from softmoe.convert.vmoe import from_vmoe, to_vmoe

__all__ = ["from_vmoe", "to_vmoe"]
