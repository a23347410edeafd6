"""Go from a model and a source of images to figures, inspect.json and a page."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from softmoe import __version__
from softmoe.data import BrokenImage, Example, Source, Transform, evaluation_batches, to_tensor
from softmoe.inspection import plots
from softmoe.inspection.collect import Inspection, Sample, evenly, layer_results, take_weights
from softmoe.inspection.page import write_page
from softmoe.models import VisionTransformer
from softmoe.moe.record import evaluating, moe_layers
from softmoe.storage.files import write_text


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
    about: dict[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Inspection:
    """Take statistics over all of the source, and `images` of it, evenly chosen, in full.

    `classes` name the outputs.
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
    samples = take_samples(model, source, transform, images, classes) if images else []
    return Inspection(name, count, layers, moe_layers(model), samples, about or {})


def take_samples(
    model: VisionTransformer, source: Source, transform: Transform, count: int, classes: Sequence[str] = ()
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
            said = prediction(model, image, classes)
        grid = (pixels.shape[0] // patch, pixels.shape[1] // patch)
        samples.append(Sample(np.ascontiguousarray(pixels), caption(example, source, index), grid, weights, said))
    return samples


def caption(example: Example, source: Source, index: int) -> str:
    labels = ", ".join(source.classes[label] for label in example.labels if label < len(source.classes))
    place = example.name or f"image {index}"
    return f"{labels} ({place})" if labels else place


def prediction(model: VisionTransformer, image: Tensor, classes: Sequence[str]) -> str:
    """Say what the model takes the image for, if it has a head and its outputs have names."""
    if not classes or model.config.num_classes is None:
        return ""
    probability, best = model(image.to(next(model.parameters()).device)).softmax(1).max(1)
    return f"taken for {classes[int(best)]} ({float(probability):.0%})"


def write_inspection(models: Sequence[Inspection], folder: Path, *, title: str, about: dict[str, Any]) -> list[Path]:
    """Write inspect.json, figures/*.png and *.svg, and inspect.html. Without matplotlib the page has no figures."""
    content = {
        "softmoe": __version__,
        "torch": str(torch.__version__),
        **about,
        "models": [m.to_dict() for m in models],
    }
    data = write_text(folder / "inspect.json", json.dumps(rounded(content), allow_nan=False) + "\n")
    written, shown = [data], []
    for number, model in enumerate(models):
        where = folder / "figures" if number == 0 else folder / "figures" / f"model_{number + 1}"
        drawn = plots.write_figures(model, where) if plots.available() else []
        written += [path for figure in drawn for path in figure.paths]
        shown.append([(figure.caption, figure.small_png) for figure in drawn])
    lead = f"{models[0].images:,} images of {about['data']}, split {about['split']}."
    written.append(write_page(models, folder / "inspect.html", title=title, lead=lead, figures=shown))
    return written


def rounded(value: Any) -> Any:
    """Round to seven digits: more than anyone reads, and half the file."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value
