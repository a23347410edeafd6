"""Disk -> batches: sources of images and captions, transforms, and the loader of exact, resumable batches."""

from softmoe.data.batch import Batch, TooManyBroken, soft_labels
from softmoe.data.captions import Captioned, captions_of, some_captions
from softmoe.data.decode import BrokenImage
from softmoe.data.loader import Loader, WorkerDied, evaluation_batches
from softmoe.data.mixup import mixup, mixup_weights
from softmoe.data.order import order
from softmoe.data.source import Example, Source, open_source
from softmoe.data.tokenizer import Tokenizer, train_tokenizer
from softmoe.data.transforms import Transform, TransformConfig, to_tensor

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
    "mixup",
    "mixup_weights",
    "open_source",
    "order",
    "soft_labels",
    "some_captions",
    "to_tensor",
    "train_tokenizer",
]
