"""Turn a model and images into what inspection knows of it: statistics of every layer, and a few images in full."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from softmoe.inspection.correlation import correlation_summary
from softmoe.inspection.samples import Sample
from softmoe.inspection.statistics import LayerStatistics, layer_statistics
from softmoe.moe import Router
from softmoe.moe.record import evaluating, moe_layers, record


@dataclass(frozen=True)
class Inspection:
    """One model, looked into. `layers` maps the layers' names, in the model's order, to plain results."""

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
    routers = moe_layers(model)
    if not routers:
        raise ValueError("this model has no MoE layers, so there is no routing to look into")
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
            facts = {"router": type(router).__name__, "correlation": correlation_summary(router)}
            results[name] = facts | statistics[name].result()
    return images, results
