"""Disk -> batches: sources of images and captions, transforms, and the loader of exact, resumable batches.

Names are loaded when first used: a process that only decodes images does without torch.
"""

from typing import TYPE_CHECKING

from softmoe.lazy import lazy_names

if TYPE_CHECKING:
    from softmoe.data.augment import soft_labels
    from softmoe.data.batch import Batch, TooManyBroken
    from softmoe.data.decode import BrokenImage
    from softmoe.data.feed import Feed, batches_on_device
    from softmoe.data.loader import Loader, WorkerDied, evaluation_batches
    from softmoe.data.source import Example, Source, open_source, open_splits
    from softmoe.data.texts import Captioned, Tokenizer, captions_of, some_captions, train_tokenizer
    from softmoe.data.transforms import Transform, TransformConfig, to_tensor

_HOMES = {
    "augment": ("soft_labels",),
    "batch": ("Batch", "TooManyBroken"),
    "decode": ("BrokenImage",),
    "feed": ("Feed", "batches_on_device"),
    "loader": ("Loader", "WorkerDied", "evaluation_batches"),
    "source": ("Example", "Source", "open_source", "open_splits"),
    "texts": ("Captioned", "Tokenizer", "captions_of", "some_captions", "train_tokenizer"),
    "transforms": ("Transform", "TransformConfig", "to_tensor"),
}

__all__ = [
    "Batch",
    "BrokenImage",
    "Captioned",
    "Example",
    "Feed",
    "Loader",
    "Source",
    "Tokenizer",
    "TooManyBroken",
    "Transform",
    "TransformConfig",
    "WorkerDied",
    "batches_on_device",
    "captions_of",
    "evaluation_batches",
    "open_source",
    "open_splits",
    "soft_labels",
    "some_captions",
    "to_tensor",
    "train_tokenizer",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
