"""The evaluation that the processes of a run do together."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from softmoe.data import Batch
from softmoe.models import Embeddings
from softmoe.train.evaluation import Evaluator
from softmoe.train.parts import Data
from softmoe.train.team import Team


def evaluate_share(evaluator: Evaluator, model: nn.Module, data: Data, team: Team) -> dict[str, float]:
    """The evaluator's numbers, of all validation images. On many ranks each evaluates its share, and the numbers are
    the means of the ranks', weighted by images: exact for everything that is a mean over images."""
    if team.world == 1:
        return evaluator(model, data.validation())
    steady = Steady(model, data.eval_share)
    batches = Counted(data.validation())
    first = next((batch for batch in batches if len(batch.images)), None)
    found = {} if first is None else evaluator(steady, itertools.chain([first], batches))
    for _ in batches:  # what the evaluator left
        pass
    nothing = no_inputs(data, next(model.parameters()).device)
    while steady.passes < batches.count:  # a rank without images still does its part in the others' passes
        steady(*nothing)
    shares = team.gather((found, batches.images))
    images = sum(count for _, count in shares)
    if not images:
        raise ValueError("there is nothing to evaluate on: the validation data has no readable image")
    names = next(numbers for numbers, _ in shares if numbers)
    return {name: sum(numbers.get(name, 0.0) * count for numbers, count in shares) / images for name in names}


class Steady(nn.Module):
    """The model, given the same number of images in every pass: on all ranks the experts see equal slots."""

    def __init__(self, model: nn.Module, rows: int):
        super().__init__()
        self.model, self.rows, self.passes = model, rows, 0

    def forward(self, *inputs: Tensor) -> Any:
        """Images, and for two towers tokens."""
        self.passes += 1
        rows = inputs[0].shape[0]
        found = self.model(*(torch.cat([x, x.new_zeros(self.rows - rows, *x.shape[1:])]) for x in inputs))
        if isinstance(found, Embeddings):
            return found._replace(image=found.image[:rows], text=found.text[:rows])  # pyright: ignore[reportOptionalSubscript]
        return found[:rows]


def no_inputs(data: Data, device: torch.device) -> tuple[Tensor, ...]:
    """What a model is given, of no images."""
    images = torch.zeros(0, 3, *data.config.data.transform.size, device=device)
    if data.tokenizer is None:
        return (images,)
    return images, torch.zeros(0, data.config.text.length, dtype=torch.int64, device=device)


class Counted:
    """Batches, and how many of them and of their images went by."""

    def __init__(self, batches: Iterable[Batch]):
        self.count = self.images = 0
        self._batches = iter(batches)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self._batches)
        self.count += 1
        self.images += len(batch.images)
        return batch
