"""Disk -> batches: sources of images and captions, transforms, and the loader of exact, resumable batches.

Names are loaded when first used: a process that only decodes images does without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from softmoe.data.batch import Batch, TooManyBroken, soft_labels
    from softmoe.data.captions import Captioned, captions_of, some_captions
    from softmoe.data.decode import BrokenImage
    from softmoe.data.loader import Loader, WorkerDied, evaluation_batches
    from softmoe.data.source import Example, Source, open_source
    from softmoe.data.tokenizer import Tokenizer, train_tokenizer
    from softmoe.data.transforms import Transform, TransformConfig, to_tensor

_HOME = {
    "Batch": "batch",
    "BrokenImage": "decode",
    "Captioned": "captions",
    "Example": "source",
    "Loader": "loader",
    "Source": "source",
    "Tokenizer": "tokenizer",
    "TooManyBroken": "batch",
    "Transform": "transforms",
    "TransformConfig": "transforms",
    "WorkerDied": "loader",
    "captions_of": "captions",
    "evaluation_batches": "loader",
    "open_source": "source",
    "soft_labels": "batch",
    "some_captions": "captions",
    "to_tensor": "transforms",
    "train_tokenizer": "tokenizer",
}

__all__ = [
    "Batch",
    "BrokenImage",
    "Captioned",
    "Example",
    "Loader",
    "Source",
    "Tokenizer",
    "TooManyBroken",
    "Transform",
    "TransformConfig",
    "WorkerDied",
    "captions_of",
    "evaluation_batches",
    "open_source",
    "soft_labels",
    "some_captions",
    "to_tensor",
    "train_tokenizer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'softmoe.data' has no attribute {name!r}")
    return getattr(import_module(f"softmoe.data.{_HOME[name]}"), name)
