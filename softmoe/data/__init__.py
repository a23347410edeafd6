"""Disk -> batches: sources of images, transforms, and the loader that makes exact, resumable batches."""

from softmoe.data.batch import Batch, TooManyBroken, soft_labels
from softmoe.data.decode import BrokenImage
from softmoe.data.loader import Loader, WorkerDied, evaluation_batches
from softmoe.data.mixup import mixup, mixup_weights
from softmoe.data.order import order
from softmoe.data.source import Example, Source, open_source
from softmoe.data.transforms import Transform, TransformConfig, to_tensor

__all__ = [
    "Batch",
    "BrokenImage",
    "Example",
    "Loader",
    "Source",
    "TooManyBroken",
    "Transform",
    "TransformConfig",
    "WorkerDied",
    "evaluation_batches",
    "mixup",
    "mixup_weights",
    "open_source",
    "order",
    "soft_labels",
    "to_tensor",
]
