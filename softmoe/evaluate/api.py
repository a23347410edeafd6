"""From names to numbers in one call: what the commands do, for use from Python."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from softmoe.data import Batch, Source, evaluation_batches
from softmoe.evaluate.classify import Beside, Loss, count, outputs_of
from softmoe.evaluate.features import Features, Progress, extract
from softmoe.evaluate.fewshot import SHOTS, Protocol, few_shot
from softmoe.evaluate.inputs import (
    Loaded,
    NewLabels,
    find_images,
    load,
    match_classes,
    open_data,
    random_subset,
    read_labels,
)
from softmoe.evaluate.knn import nearest_neighbors
from softmoe.evaluate.linear_probe import linear_probe
from softmoe.evaluate.prediction import Prediction, Unreadable, predict_files
from softmoe.inference import Storage


def evaluate(
    model: str | Path,
    data: str,
    *,
    split: str = "val",
    labels: str | Path | None = None,
    examples: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    loss: Loss = "softmax",
    batch_size: int = 128,
    workers: int = 0,
    device: str = "auto",
    weights: Storage | None = None,
    agreement: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Accuracy, loss and calibration of a saved model on data, with a row for every class, as plain values for JSON.

    `labels` is a JSON file of labels to use instead of the data's, several per image (ReaL). `weights` prepares the
    model for inference, with experts stored so; `agreement` also runs it as it was saved and counts how often both
    put the same class first.
    """
    loaded = load(model, device=device, image_size=image_size, weights=weights)
    judged = Beside(loaded.model, load(model, device=device).model) if agreement else loaded.model
    outputs = outputs_of(loaded.model)
    source = random_subset(open_data(data, split), examples)
    if labels is None:
        matched, how = match_classes(source, loaded.saved.classes, outputs)
    else:
        matched, how = NewLabels(source, read_labels(labels), loaded.class_names()), "file"
    broken: list[tuple[str, str]] = []

    def watched():
        done = 0
        for batch in evaluation_batches(matched, loaded.transform, batch_size, workers=workers):
            broken.extend(batch.broken)
            yield batch
            done += _size(batch)
            if progress is not None:
                progress(done, len(matched))

    totals = count(judged, watched(), loss=loss)
    return {
        **_about(loaded, {data: matched}, split=split),
        "weights": weights or "as saved",
        "numbers": totals.numbers() | (judged.numbers() if isinstance(judged, Beside) else {}),
        "images": totals.images,
        "unlabeled": totals.unlabeled,
        "unreadable": [{"image": name, "reason": reason} for name, reason in broken],
        "multi_label": matched.multi_label,
        "classes_matched_by": how,
        "classes": totals.class_table(loaded.saved.classes or matched.classes),
        "calibration": totals.calibration_table(),
    }


def fewshot(
    model: str | Path,
    data: Sequence[str],
    *,
    shots: Sequence[int] = SHOTS,
    seeds: int = 3,
    protocol: Protocol = "loo",
    knn: bool = False,
    linear: bool = False,
    train_split: str = "train",
    test_split: str = "val",
    train_examples: int | None = None,
    test_examples: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    batch_size: int = 128,
    workers: int = 0,
    device: str = "auto",
    cache: bool = True,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Few-shot accuracy of a saved model's features on data sets; nearest neighbors and a probe if asked."""
    names = [data] if isinstance(data, str) else list(data)
    loaded = load(model, device=device, image_size=image_size)
    sources = {}
    for name in names:
        parts = (open_data(name, train_split), train_examples), (open_data(name, test_split), test_examples)
        sources[name] = tuple(random_subset(source, examples) for source, examples in parts)

    def features(source: Source) -> Features:
        options: dict[str, Any] = {"batch_size": batch_size, "workers": workers, "cache": cache, "progress": progress}
        return extract(loaded.model, source, loaded.transform, **options)

    pairs = {name: (features(train), features(test)) for name, (train, test) in sources.items()}
    report = {
        **_about(loaded, {name: pair[1] for name, pair in sources.items()}, split=test_split),
        "train_data": {name: pair[0].fingerprint for name, pair in sources.items()},
        "images": {name: {"train": len(train), "test": len(test)} for name, (train, test) in pairs.items()},
        "fewshot": few_shot(pairs, shots=shots, seeds=seeds, protocol=protocol).to_dict(),
    }
    if knn:
        report["knn"] = {name: nearest_neighbors(*pair) for name, pair in pairs.items()}
    if linear:
        report["linear_probe"] = {name: linear_probe(*pair) for name, pair in pairs.items()}
    return report


def predict(
    model: str | Path,
    images: str | Path | Sequence[str | Path],
    *,
    top: int = 5,
    image_size: int | tuple[int, int] | None = None,
    batch_size: int = 64,
    workers: int = 0,
    device: str = "auto",
    weights: Storage | None = None,
) -> tuple[list[Prediction], list[Unreadable]]:
    """The likeliest classes and the features of image files, folders and patterns; and what was unreadable."""
    names = [images] if isinstance(images, str | Path) else images
    paths = find_images([str(name) for name in names])
    loaded = load(model, device=device, image_size=image_size, weights=weights)
    found = list(predict_files(loaded, paths, top=top, batch_size=batch_size, workers=workers))
    return [p for p in found if isinstance(p, Prediction)], [u for u in found if isinstance(u, Unreadable)]


def _about(loaded: Loaded, data: dict[str, Source], *, split: str) -> dict[str, Any]:
    """What a number needs beside it to mean something later."""
    return {
        "model": str(loaded.saved.folder),
        "model_fingerprint": loaded.saved.fingerprint,
        "preprocessing": asdict(loaded.preprocessing),
        "data": {name: source.fingerprint for name, source in data.items()},
        "split": split,
    }


def _size(batch: Batch) -> int:
    return len(batch) + len(batch.broken)
