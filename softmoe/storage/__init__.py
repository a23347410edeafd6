"""Bytes on disk: saved models, checkpoints of one process or of many, and the one way files are written.

Names are loaded when first used: whoever writes a file needs no model.
"""

from typing import TYPE_CHECKING

from softmoe.lazy import lazy_names

if TYPE_CHECKING:
    from softmoe.storage import hub
    from softmoe.storage.adapters import save_adapters
    from softmoe.storage.checkpoint import BrokenCheckpoint, Snapshot, read_checkpoint, write_checkpoint
    from softmoe.storage.checkpoint_section import CheckpointSection
    from softmoe.storage.preprocessing import Preprocessing
    from softmoe.storage.pretrained import load_saved, load_two_tower, save_pretrained, save_tensors
    from softmoe.storage.saved import SavedModel, TokenizerFile, open_saved
    from softmoe.storage.store import CheckpointStore

_HOMES = {
    "adapters": ("save_adapters",),
    "checkpoint": ("BrokenCheckpoint", "Snapshot", "read_checkpoint", "write_checkpoint"),
    "checkpoint_section": ("CheckpointSection",),
    "hub": (),
    "preprocessing": ("Preprocessing",),
    "pretrained": ("load_saved", "load_two_tower", "save_pretrained", "save_tensors"),
    "saved": ("SavedModel", "TokenizerFile", "open_saved"),
    "store": ("CheckpointStore",),
}

__all__ = [
    "BrokenCheckpoint",
    "CheckpointSection",
    "CheckpointStore",
    "Preprocessing",
    "SavedModel",
    "Snapshot",
    "TokenizerFile",
    "hub",
    "load_saved",
    "load_two_tower",
    "open_saved",
    "read_checkpoint",
    "save_adapters",
    "save_pretrained",
    "save_tensors",
    "write_checkpoint",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
