"""The evaluators that run during training, and how several processes share one.

An evaluator turns a model and validation batches into named numbers. The defaults are accuracy and loss, of classes
and of captions; any other function of the same form works too.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from softmoe.data import Batch
from softmoe.data.feed import results_on_host, to_device
from softmoe.models import Embeddings
from softmoe.models.classification import Loss, Totals
from softmoe.parallel.reduce import gather_uneven
from softmoe.train.data import Data
from softmoe.train.distributed import Team
from softmoe.train.objectives import Contrastive, contrastive_loss


@dataclass(frozen=True)
class Sums:
    """Sums by name over `count` things, such as images with a label. Those of several processes add up."""

    values: dict[str, float]
    count: int

    @classmethod
    def of(cls, found: "Sums | dict[str, float]", images: int) -> "Sums":
        """Return what an evaluator found; numbers alone are taken for means over the images that it was given."""
        return (
            found if isinstance(found, Sums) else cls({name: value * images for name, value in found.items()}, images)
        )

    @staticmethod
    def means(parts: "Iterable[Sums]") -> dict[str, float]:
        """Return the means over the things of all parts."""
        parts = [part for part in parts if part.count]
        if not parts:
            raise ValueError(
                "there is nothing to evaluate on: no validation image could be read, or none has what is asked for "
                "(a label, a caption)"
            )
        count = sum(part.count for part in parts)
        return {name: sum(part.values[name] for part in parts) / count for name in parts[0].values}


Evaluator = Callable[[nn.Module, Iterable[Batch]], Sums | dict[str, float]]
"""A function of a model in evaluation mode and batches (on any device) that returns named numbers and has no state.

Each of several processes calls it on its share of every batch, which may be empty. What counts other things than images
returns `Sums`."""


@torch.no_grad()
def classify(model: nn.Module, batches: Iterable[Batch], loss: Loss = "softmax") -> Sums:
    """Return the sums of top1, top5 and loss over the images with a label; of several any is right."""
    device = next(model.parameters()).device
    totals: Totals | None = None
    found = ((model(batch.images.to(device)), batch.labels) for batch in batches)
    for logits_BC, labels in results_on_host(found):
        totals = totals or Totals(logits_BC.shape[-1], loss)
        totals.add(logits_BC, labels)
    if totals is None:
        return Sums({}, 0)
    return Sums(dict(zip(("top1", "top5", "loss"), totals.sums[1:4].tolist(), strict=True)), totals.images)


def match_pairs(model: nn.Module, batches: Iterable[Batch], objective: Contrastive) -> Sums:
    """Sum up the loss, and how often the own caption of an image is the nearest of its batch, and the other way round.

    top1 is the mean of both. Of several captions the first counts. A tie is a miss. The batch is that of all processes,
    each of which counts all of it.
    """
    device = next(model.parameters()).device
    sums = {"top1": 0.0, "image_to_text": 0.0, "text_to_image": 0.0, "loss": 0.0}
    pairs, shared = 0, isinstance(model, FixedBatchModel)

    def found() -> Iterator[tuple[Tensor, ...]]:
        for batch in batches:
            e = objective.embed(model, to_device(batch, device))
            assert e.image is not None
            assert e.text is not None
            images, texts = (gather_uneven(rows) if shared else rows for rows in (e.image, e.text))
            if len(images):
                e = e._replace(image=images, text=texts)
                yield (*matches(e, objective.config.loss), torch.tensor(len(images)))

    for to_text, to_image, loss, rows in results_on_host(found()):
        sums["image_to_text"] += float(to_text)
        sums["text_to_image"] += float(to_image)
        sums["top1"] += float(to_text + to_image) / 2
        sums["loss"] += float(loss) * int(rows)
        pairs += int(rows)
    return Sums(sums, pairs)


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

    The numbers are means over all that the ranks counted.
    """
    if team.world == 1:
        found = evaluator(model, (batch for batch in data.validation() if len(batch.images)))
        return found if isinstance(found, dict) else Sums.means([found])
    fixed = FixedBatchModel(model, data.eval_share)
    batches = CountedBatches(data.validation())
    try:
        found = evaluator(fixed, batches)
    except Exception:
        if batches.images or batches.broke_off:
            raise
        found = Sums({}, 0)  # it does not know what to say of a share without images
    for _ in batches:  # count those that the evaluator did not read
        pass
    nothing = no_inputs(data, next(model.parameters()).device)
    while fixed.passes < batches.count:  # other ranks need the experts of a rank without images
        fixed(*nothing)
    return Sums.means(team.gather(Sums.of(found, batches.images)))


class FixedBatchModel(nn.Module):
    """A model whose batches are shared by several ranks.

    It pads its share to the same number of images everywhere, so that experts exchange equal slots on all ranks.
    """

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
        self.broke_off = False
        """Whether the data could not be read on."""
        self._batches = iter(batches)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        try:
            batch = next(self._batches)
        except Exception as error:
            self.broke_off = not isinstance(error, StopIteration)
            raise
        self.count += 1
        self.images += len(batch.images)
        return batch
