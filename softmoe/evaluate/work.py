"""The work of the commands for classifiers: evaluate, few-shot and predict."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any

from torch import nn

from softmoe.data import Batch, Source, evaluation_batches, open_source
from softmoe.evaluate.api import Evaluate, FewShot, Predict, as_list
from softmoe.evaluate.classify import Beside, Prediction, Predictor, Unreadable, count, outputs_of
from softmoe.evaluate.features import Features, Progress, extract
from softmoe.evaluate.inputs import (
    Loaded,
    NewLabels,
    evaluation_transform,
    find_images,
    load,
    match_classes,
    random_subset,
    read_labels,
)
from softmoe.evaluate.mistakes import Mistakes
from softmoe.evaluate.probes import linear_probe, nearest_neighbors
from softmoe.evaluate.ridge import few_shot
from softmoe.models import VisionTransformer
from softmoe.storage import Preprocessing


def run_evaluate(options: Evaluate, progress: Progress | None = None) -> dict[str, Any]:
    """Return named numbers and what they were measured on, as plain values for JSON."""
    loaded = load(options.model, weights=options.weights, **options.model_options)
    judged = (
        Beside(loaded.model, load(options.model, device=options.device).model) if options.agreement else loaded.model
    )
    outputs = outputs_of(loaded.model)
    source = random_subset(open_source(options.data, options.split), options.examples)
    if options.labels is None:
        matched, how = match_classes(source, loaded.saved.classes, outputs)
    else:
        matched, how = NewLabels(source, read_labels(options.labels), loaded.class_names()), "file"
    broken: list[tuple[str, str]] = []

    def watched() -> Iterator[Batch]:
        done = 0
        how_made = {"workers": options.workers, "raw": next(loaded.model.parameters()).device.type != "cpu"}
        for batch in evaluation_batches(matched, loaded.transform, options.batch_size, **how_made):
            broken.extend(batch.broken)
            yield batch
            done += len(batch) + len(batch.broken)
            if progress is not None:
                progress(done, len(matched))

    mistakes = Mistakes()
    totals = count(
        judged,
        watched(),
        loss=options.loss,
        see=mistakes.add,
    )
    names = loaded.saved.classes or matched.classes
    return {
        **_about(loaded, {options.data: matched}, split=options.split),
        "weights": options.weights or "as saved",
        "numbers": totals.numbers() | (judged.numbers() if isinstance(judged, Beside) else {}),
        "images": totals.images,
        "unlabeled": totals.unlabeled,
        "unreadable": [{"image": name, "reason": reason} for name, reason in broken],
        "multi_label": matched.multi_label,
        "classes_matched_by": how,
        "classes": totals.class_table(names),
        **mistakes.to_dict(names, matched),
        "calibration": totals.calibration_table(),
    }


def run_fewshot(options: FewShot, progress: Progress | None = None) -> dict[str, Any]:
    """Accuracies by data and number of shots; nearest neighbors and a probe if asked."""
    loaded = load(options.model, **options.model_options)
    sources = {name: (_part(options, name, "train"), _part(options, name, "test")) for name in as_list(options.data)}

    def features(source: Source) -> Features:
        return extract(loaded.model, source, loaded.transform, **options.feature_options(progress))

    pairs = {name: (features(train), features(test)) for name, (train, test) in sources.items()}
    found = few_shot(pairs, shots=options.shots, seeds=options.seeds, protocol=options.protocol)
    report = {
        **_about(loaded, {name: pair[1] for name, pair in sources.items()}, split=options.test_split),
        "train_data": {name: pair[0].fingerprint for name, pair in sources.items()},
        "images": {name: {"train": len(train), "test": len(test)} for name, (train, test) in pairs.items()},
        "fewshot": found.to_dict(),
    }
    if options.knn:
        report["knn"] = {name: nearest_neighbors(*pair) for name, pair in pairs.items()}
    if options.linear:
        report["linear_probe"] = {name: linear_probe(*pair) for name, pair in pairs.items()}
    return report


def _part(options: FewShot, name: str, part: str) -> Source:
    """Open the training or the test images of a source; of one that is drawn without end, four times the shots."""
    split, examples = getattr(options, f"{part}_split"), getattr(options, f"{part}_examples")
    source = open_source(name, split)
    if part == "train" and examples is None and getattr(source, "generated", False):
        examples = 4 * max(options.shots) * len(source.classes)
    return random_subset(source, examples)


def fewshot_evaluator(
    data: str, preprocessing: Preprocessing
) -> Callable[[nn.Module, Iterable[Batch]], dict[str, float]]:
    """Return an evaluator for the training loop: the accuracy of 10 images a class on the model's features.

    It looks at its own data, at most 5,000 training and 2,000 test images, always the same, and not at the batches.
    """
    parts = (("train", 5000), ("val", 2000))
    train, test = (random_subset(open_source(data, split), most) for split, most in parts)
    transform = evaluation_transform(preprocessing)

    def evaluator(model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        if not isinstance(model, VisionTransformer):
            raise ValueError(
                "evaluation.fewshot works in one process; evaluate checkpoints with softmoe fewshot instead"
            )
        features = [extract(model, source, transform, cache=False) for source in (train, test)]
        found = few_shot({"data": (features[0], features[1])}, shots=(10,), seeds=1)
        return {"10shot": found.accuracies["data"][10][0]}

    return evaluator


def run_predict(options: Predict, progress: Progress | None = None) -> tuple[list[Prediction], list[Unreadable]]:
    """Classes and features of what can be read, and what cannot."""
    paths = find_images(as_list(options.images))
    loaded = load(options.model, weights=options.weights, **options.model_options)
    predictor = Predictor(loaded, top=options.top)
    found = list(predictor.predict_files(paths, batch_size=options.batch_size, workers=options.workers))
    return [p for p in found if isinstance(p, Prediction)], [u for u in found if isinstance(u, Unreadable)]


def _about(loaded: Loaded, data: dict[str, Source], *, split: str) -> dict[str, Any]:
    """Return the facts that a number needs beside it to mean something later."""
    return {
        "model": str(loaded.saved.folder),
        "model_fingerprint": loaded.saved.fingerprint,
        "preprocessing": asdict(loaded.preprocessing),
        "data": {name: source.fingerprint for name, source in data.items()},
        "split": split,
    }
