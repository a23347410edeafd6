"""Bytes on disk: saved models, checkpoints of one process or of many, and the one way files are written."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from softmoe.storage import hub
    from softmoe.storage.adapters import save_adapters
    from softmoe.storage.checkpoint import BrokenCheckpoint, Snapshot, read_checkpoint, write_checkpoint
    from softmoe.storage.preprocessing import Preprocessing
    from softmoe.storage.pretrained import load_saved, load_two_tower, save_pretrained, save_tensors
    from softmoe.storage.saved import SavedModel, TokenizerFile, open_saved
    from softmoe.storage.store import CheckpointSection, CheckpointStore

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


def __getattr__(name: str) -> Any:
    """Import on first use: who writes a file needs no model."""
    if name == "hub":
        return import_module("softmoe.storage.hub")
    if name in __all__:
        # each imports those before it
        homes = ("checkpoint", "store", "preprocessing", "saved", "adapters", "pretrained")
        for home in homes:
            module = import_module(f"softmoe.storage.{home}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
