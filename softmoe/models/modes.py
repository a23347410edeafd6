"""Looking at a model without changing how it is."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """No dropout, no routing noise; afterwards each model is in the mode it was in."""
    modes = [model.training for model in models]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for model, mode in zip(models, modes, strict=True):
            model.train(mode)
