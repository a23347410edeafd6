"""Turn a model and images into what inspection knows of it: statistics of every layer, and a few images in full.

Letters: B images, M tokens, N experts, S slots.

Images in full have every slot's weights at every patch, small enough to put into a page. Soft weights are kept as
logits, with the parts that depend on the token or on the slot alone taken out:

    dispatch = softmax over tokens of (token + rest)      combine = softmax over slots of (slot + rest)

So one table `rest` of M x S bytes serves both, unless places count in dispatch alone: then each has its own. Bytes are
even steps of the logits; a weight is off by at most half a step, relatively. Assignments of sparse routers are kept as
even steps of the weights themselves.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from softmoe.accelerate.guards import plain_class
from softmoe.data import BrokenImage, Example, Source, Transform, evaluation_batches, to_tensor
from softmoe.inspection.statistics import LayerStatistics, correlation_summary, layer_statistics
from softmoe.models import VisionTransformer
from softmoe.models.classification import Loss, probabilities
from softmoe.moe import DenseRouting, PlacedRouter, Router, Routing, SparseRouting
from softmoe.moe.record import evaluating, record, routers_by_layer

TOLERANCE = 1e-4  # how well one table must serve both kinds of weights
FINEST = 255


@dataclass(frozen=True)
class Steps:
    """Keeps numbers as low + step * code."""

    codes: np.ndarray
    low: float
    step: float
    levels: int

    @classmethod
    def of(cls, values: np.ndarray, levels: int) -> "Steps":
        low, high = float(values.min()), float(values.max())
        step = (high - low) / levels or 1.0
        codes = np.rint((values - low) / step).astype(np.uint8 if levels < 256 else np.uint16)
        return cls(codes, low, step, levels)

    def values(self) -> np.ndarray:
        return self.low + self.step * self.codes.astype(np.float64)

    def coarser(self, levels: int) -> "Steps":
        """Return the numbers in fewer steps; the ends stay where they are."""
        if levels >= self.levels:
            return self
        codes = np.rint(self.codes * (levels / self.levels)).astype(self.codes.dtype)
        return Steps(codes, self.low, self.step * self.levels / levels, levels)


@dataclass(frozen=True)
class WeightTable:
    """One kind of weights, or both, of one image in one layer. `soft` tables hold logits, others the weights."""

    rest_MS: Steps
    soft: bool
    token_M: Steps | None = None
    slot_S: Steps | None = None

    def dispatch(self) -> np.ndarray:
        """Return the dispatch weights (M, S)."""
        rest_MS = self.rest_MS.values()
        return softmax(self.token_M.values()[:, None] + rest_MS, 0) if self.soft and self.token_M else rest_MS

    def combine(self) -> np.ndarray:
        """Return the combine weights (M, S)."""
        rest_MS = self.rest_MS.values()
        return softmax(self.slot_S.values()[None, :] + rest_MS, 1) if self.soft and self.slot_S else rest_MS

    def coarser(self, levels: int) -> "WeightTable":
        return replace(self, rest_MS=self.rest_MS.coarser(levels))


@dataclass(frozen=True)
class Weights:
    """Dispatch and combine weights of one image in one layer; `combine` is None where one table serves both."""

    dispatch: WeightTable
    combine: WeightTable | None = None

    def dispatch_MS(self) -> np.ndarray:
        return self.dispatch.dispatch()

    def combine_MS(self) -> np.ndarray:
        return (self.combine or self.dispatch).combine()

    def coarser(self, levels: int) -> "Weights":
        return Weights(self.dispatch.coarser(levels), None if self.combine is None else self.combine.coarser(levels))


@dataclass(frozen=True)
class Sample:
    """One image as the model sees it, what is said about it, and its weights in each layer."""

    pixels: np.ndarray
    """(height, width, 3) uint8"""
    caption: str
    grid: tuple[int, int]
    """Rows and columns of patches; tokens before them (a class token) are the rest of M."""
    weights: dict[str, Weights] = field(default_factory=dict)
    prediction: str = ""
    """The class the model takes it for, in words."""


@torch.inference_mode()
def take_weights(model: nn.Module, images: torch.Tensor) -> list[dict[str, Weights]]:
    """Return {layer: its weights} for each image, images one at a time: memory is that of one."""
    device = next(model.parameters()).device
    found = []
    for image in images.to(device).split(1):
        with record(model) as recording:
            model(image)
        found.append({name: compress(routing) for name, routing in recording.routings.items()})
    return found


def compress(routing: Routing) -> Weights:
    """Return the weights of a routing of one image."""
    dispatch_MS, combine_MS = dense_weights(routing)
    if isinstance(routing, SparseRouting):
        return Weights(
            WeightTable(Steps.of(dispatch_MS, FINEST), False), WeightTable(Steps.of(combine_MS, FINEST), False)
        )
    log_MS = np.log(np.maximum(dispatch_MS, 1e-37))
    log_combine_MS = np.log(np.maximum(combine_MS, 1e-37))
    shared_S = log_combine_MS[0] - log_MS[0]  # the same for all tokens, up to a constant, if both are of one logit
    one_table = np.abs(softmax(log_MS + shared_S, 1) - combine_MS).max() < TOLERANCE
    dispatch = logit_table(log_MS, shared_S if one_table else None)
    return Weights(dispatch, None if one_table else logit_table(log_combine_MS))


def logit_table(logits_MS: np.ndarray, more_S: np.ndarray | None = None) -> WeightTable:
    token_M = logits_MS.mean(1)
    slot_S = (logits_MS - token_M[:, None]).mean(0)
    rest_MS = logits_MS - token_M[:, None] - slot_S
    return WeightTable(
        Steps.of(rest_MS, FINEST),
        True,
        Steps.of(token_M, 2**16 - 1),
        Steps.of(slot_S if more_S is None else slot_S + more_S, 2**16 - 1),
    )


def dense_weights(routing: Routing) -> tuple[np.ndarray, np.ndarray]:
    """Return dispatch and combine weights (M, S) of one image; of sparse routers (M, N): which experts hold a token."""
    if isinstance(routing, DenseRouting):
        weights = (routing.dispatch_weights[0], routing.combine_weights[0])
        return tuple(w.flatten(1).cpu().double().numpy() for w in weights)  # pyright: ignore[reportReturnType]
    assert isinstance(routing, SparseRouting)
    tokens_NS, gates_NS = routing.token_of_slot_NS.cpu().numpy(), routing.gate_NS.cpu().double().numpy()
    N, M = len(tokens_NS), routing.mask_T.numel()
    held_MN, gate_MN = np.zeros((M + 1, N)), np.zeros((M + 1, N))  # the last row takes the empty places
    for n in range(N):
        held_MN[tokens_NS[n], n] = 1.0
        gate_MN[tokens_NS[n], n] = gates_NS[n]
    return held_MN[:M], gate_MN[:M]


def different_slots(weights_MS: np.ndarray, count: int) -> list[int]:
    """Choose slots whose weights differ most: first the sharpest, then always the one farthest from those chosen."""
    rows_SM = weights_MS.T / np.maximum(np.linalg.norm(weights_MS.T, axis=1, keepdims=True), 1e-300)
    chosen = [int(weights_MS.max(0).argmax())]
    distance_S = np.full(len(rows_SM), np.inf)
    while len(chosen) < min(count, len(rows_SM)):
        distance_S = np.minimum(distance_S, 1.0 - rows_SM @ rows_SM[chosen[-1]])
        distance_S[chosen] = -1.0
        chosen.append(int(distance_S.argmax()))
    return chosen


def softmax(logits: np.ndarray, axis: int) -> np.ndarray:
    raised = np.exp(logits - logits.max(axis, keepdims=True))
    return raised / raised.sum(axis, keepdims=True)


def evenly(total: int, count: int) -> Sequence[int]:
    """Choose so many indices spread over 0..total-1: sources are often sorted by class."""
    return np.unique(np.linspace(0, total - 1, min(total, count)).round().astype(int)).tolist()


@dataclass(frozen=True)
class Inspection:
    """The findings inside one model. `layers` maps the layers' names, in the model's order, to plain results."""

    name: str
    images: int
    layers: dict[str, dict[str, Any]]
    routers: dict[str, Router]
    samples: list[Sample] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return for JSON everything but the samples' weights."""
        return {"name": self.name, **self.about, "images": self.images, "layers": self.layers}


def layer_results(model: nn.Module, batches: Iterable[Tensor]) -> tuple[int, dict[str, dict[str, Any]]]:
    """Run the model over batches of images (B, 3, height, width) and sum up each layer's routings.

    Returns the number of images and {layer: result}. Memory is that of one batch and of the sums.
    """
    routers = routers_by_layer(model)
    if not routers:
        raise ValueError("this model has no MoE layers, so there is no routing to look into; softmoe upcycle adds some")
    device = next(model.parameters()).device
    statistics: dict[str, LayerStatistics] = {}
    images = 0
    with evaluating(model), torch.inference_mode(), record(model) as recording:
        for batch in batches:
            if not len(batch):
                continue
            model(batch.to(device))
            for name, routing in recording.routings.items():
                if name not in statistics:
                    statistics[name] = layer_statistics(routers[name], routing)
                statistics[name].add(routing)
            recording.clear()
            images += len(batch)
    if not images:
        raise ValueError("there is no image to look at: the data is empty, or none of it can be read")
    results = {}
    for name, router in routers.items():
        if name in statistics:
            facts = {"router": plain_class(router).__name__, "correlation": correlation_summary(router)}
            if isinstance(router, PlacedRouter):
                facts["combine_place"] = router.combine_place
            results[name] = facts | statistics[name].result()
    return images, results


def layer_label(layer: str) -> str:
    """Shorten encoder.blocks.3.mlp to block 3; other names stay as they are."""
    parts = layer.split(".")
    return f"block {parts[2]}" if layer.startswith("encoder.blocks.") and len(parts) == 4 else layer


def inspect_source(
    model: VisionTransformer,
    source: Source,
    transform: Transform,
    *,
    name: str,
    images: int = 16,
    batch_size: int = 32,
    workers: int = 0,
    classes: Sequence[str] = (),
    loss: Loss = "softmax",
    about: dict[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Inspection:
    """Take statistics over all of the source, and `images` of it, evenly chosen, in full.

    `classes` name the outputs, and `loss`, with which the model was trained, says what they mean.
    """
    if images < 0:
        raise ValueError(f"the number of images to show must not be negative, got {images}")

    def tensors() -> Iterator[Tensor]:
        done = 0
        for batch in evaluation_batches(source, transform, batch_size, workers=workers):
            yield batch.images
            done += len(batch) + len(batch.broken)
            if progress is not None:
                progress(done, len(source))

    count, layers = layer_results(model, tensors())
    samples = take_samples(model, source, transform, images, classes, loss) if images else []
    return Inspection(name, count, layers, routers_by_layer(model), samples, about or {})


def take_samples(
    model: VisionTransformer,
    source: Source,
    transform: Transform,
    count: int,
    classes: Sequence[str] = (),
    loss: Loss = "softmax",
) -> list[Sample]:
    """Take images spread over the source, as the model sees them; unreadable ones are left out."""
    samples = []
    patch = model.config.patch_size
    for index in evenly(len(source), count):
        rng = np.random.default_rng(0)
        try:
            example = source[index]
        except BrokenImage:
            continue
        pixels = transform.apply(
            example.image, transform.plan(example.image.shape[0], example.image.shape[1], rng), rng
        )
        image = to_tensor(pixels)[None]
        with evaluating(model), torch.inference_mode():
            weights = take_weights(model, image)[0]
            said = prediction(model, image, classes, loss)
        grid = (pixels.shape[0] // patch, pixels.shape[1] // patch)
        samples.append(Sample(np.ascontiguousarray(pixels), caption(example, source, index), grid, weights, said))
    return samples


def caption(example: Example, source: Source, index: int) -> str:
    labels = ", ".join(source.classes[label] for label in example.labels if label < len(source.classes))
    place = example.name or f"image {index}"
    return f"{labels} ({place})" if labels else place


def prediction(model: VisionTransformer, image: Tensor, classes: Sequence[str], loss: Loss) -> str:
    """Say what the model takes the image for, if it has a head and its outputs have names."""
    if not classes or model.config.num_classes is None:
        return ""
    probability, best = probabilities(model(image.to(next(model.parameters()).device)), loss).max(1)
    return f"taken for {classes[int(best)]} ({float(probability):.0%})"
