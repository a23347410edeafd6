"""The evaluators that run during training, and how several processes share one.

An evaluator turns a model and validation batches into named numbers. The defaults are accuracy and loss, of classes
and of captions; any other function of the same form works too.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from softmoe.data import Batch
from softmoe.data.feed import results_on_host, to_device
from softmoe.models import Embeddings
from softmoe.models.classification import Loss, Totals
from softmoe.train.data import Data
from softmoe.train.distributed import Team
from softmoe.train.objectives import Contrastive, contrastive_loss

Evaluator = Callable[[nn.Module, Iterable[Batch]], dict[str, float]]
"""A function of a model in evaluation mode and batches (on any device) that returns named numbers and has no state."""


@torch.no_grad()
def classify(model: nn.Module, batches: Iterable[Batch], loss: Loss = "softmax") -> dict[str, float]:
    """Return top1, top5 and mean loss. With several labels per image a prediction is right if it is one of them."""
    device = next(model.parameters()).device
    totals: Totals | None = None
    found = ((model(batch.images.to(device)), batch.labels) for batch in batches if len(batch.images))
    for logits_BC, labels in results_on_host(found):
        totals = totals or Totals(logits_BC.shape[-1], loss)
        totals.add(logits_BC, labels)
    if totals is None:
        raise ValueError("there is nothing to evaluate on: the validation data has no readable image")
    numbers = totals.numbers()
    return {name: numbers[name] for name in ("top1", "top5", "loss")}


def match_pairs(model: nn.Module, batches: Iterable[Batch], objective: Contrastive) -> dict[str, float]:
    """Return the loss, and how often the own caption of an image is the nearest of its batch, and the other way round.

    top1 is the mean of both. Of several captions the first counts. A tie is a miss.
    """
    device = next(model.parameters()).device
    sums = {"top1": 0.0, "image_to_text": 0.0, "text_to_image": 0.0, "loss": 0.0}
    pairs = 0

    def found() -> Iterator[tuple[Tensor, ...]]:
        for batch in batches:
            if len(batch.images):
                embedded = objective.embed(model, to_device(batch, device))
                yield (*matches(embedded, objective.config.loss), batch.indices)

    for to_text, to_image, loss, indices in results_on_host(found()):
        sums["image_to_text"] += float(to_text)
        sums["text_to_image"] += float(to_image)
        sums["top1"] += float(to_text + to_image) / 2
        sums["loss"] += float(loss) * len(indices)
        pairs += len(indices)
    if not pairs:
        raise ValueError("there is nothing to evaluate on: the validation data has no readable image with a caption")
    return {name: value / pairs for name, value in sums.items()}


def matches(e: Embeddings, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Count the images whose own caption is the nearest and the captions whose own image is; return the loss too."""
    assert e.image is not None
    assert e.text is not None
    cosines_BB = e.image @ e.text.T
    own_B = cosines_BB.diagonal()
    to_text = ((cosines_BB >= own_B[:, None]).sum(1) == 1).sum()
    to_image = ((cosines_BB >= own_B[None, :]).sum(0) == 1).sum()
    return to_text, to_image, contrastive_loss(e, kind, alone=True)


def evaluate_share(evaluator: Evaluator, model: nn.Module, data: Data, team: Team) -> dict[str, float]:
    """Return the evaluator's numbers on all validation images, of which each rank evaluates its share.

    The numbers are means over ranks, weighted by images: exact for everything that is a mean over images.
    """
    if team.world == 1:
        return evaluator(model, data.validation())
    fixed = FixedBatchModel(model, data.eval_share)
    batches = CountedBatches(data.validation())
    first = next((batch for batch in batches if len(batch.images)), None)
    found = {} if first is None else evaluator(fixed, itertools.chain([first], batches))
    for _ in batches:  # count those that the evaluator did not read
        pass
    nothing = no_inputs(data, next(model.parameters()).device)
    while fixed.passes < batches.count:  # other ranks need the experts of a rank without images
        fixed(*nothing)
    shares = team.gather((found, batches.images))
    images = sum(count for _, count in shares)
    if not images:
        raise ValueError("there is nothing to evaluate on: the validation data has no readable image")
    names = next(numbers for numbers, _ in shares if numbers)
    return {name: sum(numbers.get(name, 0.0) * count for numbers, count in shares) / images for name in names}


class FixedBatchModel(nn.Module):
    """A model that pads every batch to the same number of images, so that experts exchange equal slots on all ranks."""

    def __init__(self, model: nn.Module, rows: int):
        super().__init__()
        self.model, self.rows, self.passes = model, rows, 0

    def forward(self, *inputs: Tensor) -> Any:
        """Run the model on images, and for two towers tokens."""
        self.passes += 1
        rows = inputs[0].shape[0]
        found = self.model(*(torch.cat([x, x.new_zeros(self.rows - rows, *x.shape[1:])]) for x in inputs))
        if isinstance(found, Embeddings):
            return found._replace(image=found.image[:rows], text=found.text[:rows])  # pyright: ignore[reportOptionalSubscript]
        return found[:rows]


def no_inputs(data: Data, device: torch.device) -> tuple[Tensor, ...]:
    """Return the inputs of a model for a batch of no images."""
    images = torch.zeros(0, 3, *data.config.data.transform.size, device=device)
    if data.tokenizer is None:
        return (images,)
    return images, torch.zeros(0, data.config.text.length, dtype=torch.int64, device=device)


class CountedBatches:
    """An iterator over batches that counts them and their images."""

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
