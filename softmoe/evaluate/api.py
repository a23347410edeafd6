"""Commands for classifiers: evaluate, few-shot and predict, from the names of a model and data to numbers.

A command is a frozen dataclass: its fields are the options, in Python and on the command line, and `run` does it.
"""

import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from softmoe.data import Batch, Source, evaluation_batches, open_source
from softmoe.evaluate.classify import Beside, Prediction, Predictor, Unreadable, count, outputs_of
from softmoe.evaluate.features import Features, Progress, extract
from softmoe.evaluate.fewshot import SHOTS, Protocol, few_shot
from softmoe.evaluate.inputs import (
    Loaded,
    NewLabels,
    find_images,
    load,
    match_classes,
    random_subset,
    read_labels,
)
from softmoe.evaluate.probes import linear_probe, nearest_neighbors
from softmoe.inference import Storage
from softmoe.models.classification import Loss

Names = str | Path | Sequence[str | Path]
"""One file, folder or pattern, or several."""
Options = ParamSpec("Options")
Result = TypeVar("Result", covariant=True)


@dataclass(frozen=True, kw_only=True)
class OverImages:
    """The options of every command that runs a saved model over images."""

    image_size: int | tuple[int, int] | None = None
    """Pixels, or HEIGHTxWIDTH; the size the model was saved with if not given."""
    batch_size: int = 128
    workers: int = 0
    """Processes that read images."""
    device: str = "auto"


@dataclass(frozen=True, kw_only=True)
class OverFeatures(OverImages):
    """The options of the commands that compute features, which are kept for the next time."""

    cache: bool = True
    """Do not keep the features in $SOFTMOE_CACHE (or ~/.cache/softmoe)."""

    def feature_options(self, progress: Progress | None) -> dict:
        """Arguments for `extract`."""
        names = ("batch_size", "workers", "cache")
        return {name: getattr(self, name) for name in names} | {"progress": progress}


class Command(typing.Protocol[Result]):
    def run(self, progress: Progress | None = None) -> Result: ...


def function(command: Callable[Options, Command[Result]]) -> Callable[Options, Result]:
    """Return the command as a function of its options."""

    def call(*args: Options.args, **options: Options.kwargs) -> Result:
        return command(*args, **options).run()

    call.__doc__ = f"{command.__doc__} Options are the fields of {getattr(command, '__name__', 'the command')}."
    return call


def as_list(names: Names) -> list[str]:
    return [str(names)] if isinstance(names, str | Path) else [str(name) for name in names]


@dataclass(frozen=True)
class Evaluate(OverImages):
    """Accuracy, loss and calibration of a saved model, with a row for every class."""

    model: str | Path
    """Folder of a saved model or of a run, or a Hub id (user/name)."""
    data: str
    """Source of images: a folder with SPLIT/CLASS/IMAGE, or shapes, wds:PATTERN, hf:NAME, idx:PATH, digits."""
    _: KW_ONLY
    split: str = "val"
    labels: str | Path | None = None
    """JSON of labels to use instead, several per image: a list by image number (ReaL's form) or an object by name."""
    examples: int | None = None
    """Evaluate on so many images only, chosen at random (always the same ones)."""
    loss: Loss = "softmax"
    """The loss the model was trained with; also decides what confidence means."""
    weights: Storage | None = None
    """Prepare the model for fast inference, with its experts stored so; mapped: for models larger than the memory."""
    agreement: bool = False
    """With --weights: also run the model as saved, and say how often both put the same class first."""

    def run(self, progress: Progress | None = None) -> dict[str, Any]:
        """Return named numbers and what they were measured on, as plain values for JSON."""
        loaded = load(self.model, device=self.device, image_size=self.image_size, weights=self.weights)
        judged = Beside(loaded.model, load(self.model, device=self.device).model) if self.agreement else loaded.model
        outputs = outputs_of(loaded.model)
        source = random_subset(open_source(self.data, self.split), self.examples)
        if self.labels is None:
            matched, how = match_classes(source, loaded.saved.classes, outputs)
        else:
            matched, how = NewLabels(source, read_labels(self.labels), loaded.class_names()), "file"
        broken: list[tuple[str, str]] = []

        def watched() -> Iterator[Batch]:
            done = 0
            for batch in evaluation_batches(matched, loaded.transform, self.batch_size, workers=self.workers):
                broken.extend(batch.broken)
                yield batch
                done += len(batch) + len(batch.broken)
                if progress is not None:
                    progress(done, len(matched))

        totals = count(judged, watched(), loss=self.loss)
        return {
            **_about(loaded, {self.data: matched}, split=self.split),
            "weights": self.weights or "as saved",
            "numbers": totals.numbers() | (judged.numbers() if isinstance(judged, Beside) else {}),
            "images": totals.images,
            "unlabeled": totals.unlabeled,
            "unreadable": [{"image": name, "reason": reason} for name, reason in broken],
            "multi_label": matched.multi_label,
            "classes_matched_by": how,
            "classes": totals.class_table(loaded.saved.classes or matched.classes),
            "calibration": totals.calibration_table(),
        }


@dataclass(frozen=True)
class FewShot(OverFeatures):
    """Few-shot accuracy of a saved model's features, by ridge regression in closed form."""

    model: str | Path
    """Folder of a saved model or of a run, or a Hub id (user/name)."""
    data: Names
    """Sources of images, each with a training and a test split."""
    _: KW_ONLY
    shots: tuple[int, ...] = SHOTS
    """Training images of each class."""
    seeds: int = 3
    """Draws of training images; the mean is reported."""
    protocol: Protocol = "loo"
    """loo chooses the penalty without the test set; paper chooses it by test accuracy, as the paper does."""
    knn: bool = False
    """Also classify by nearest neighbors among all training images."""
    linear: bool = False
    """Also train a linear classifier on all training images."""
    train_split: str = "train"
    test_split: str = "val"
    train_examples: int | None = None
    """Take the shots from so many training images, chosen at random, instead of from all."""
    test_examples: int | None = None

    def run(self, progress: Progress | None = None) -> dict[str, Any]:
        """Accuracies by data and number of shots; nearest neighbors and a probe if asked."""
        loaded = load(self.model, device=self.device, image_size=self.image_size)
        sources = {name: (self.part(name, "train"), self.part(name, "test")) for name in as_list(self.data)}

        def features(source: Source) -> Features:
            return extract(loaded.model, source, loaded.transform, **self.feature_options(progress))

        pairs = {name: (features(train), features(test)) for name, (train, test) in sources.items()}
        found = few_shot(pairs, shots=self.shots, seeds=self.seeds, protocol=self.protocol)
        report = {
            **_about(loaded, {name: pair[1] for name, pair in sources.items()}, split=self.test_split),
            "train_data": {name: pair[0].fingerprint for name, pair in sources.items()},
            "images": {name: {"train": len(train), "test": len(test)} for name, (train, test) in pairs.items()},
            "fewshot": found.to_dict(),
        }
        if self.knn:
            report["knn"] = {name: nearest_neighbors(*pair) for name, pair in pairs.items()}
        if self.linear:
            report["linear_probe"] = {name: linear_probe(*pair) for name, pair in pairs.items()}
        return report

    def part(self, name: str, part: str) -> Source:
        """Open the training or the test images of a source."""
        split, examples = getattr(self, f"{part}_split"), getattr(self, f"{part}_examples")
        return random_subset(open_source(name, split), examples)


@dataclass(frozen=True)
class Predict(OverImages):
    """The likeliest classes of images."""

    model: str | Path
    """Folder of a saved model or of a run, or a Hub id (user/name)."""
    images: Names
    """Image files, folders (with all below them) and patterns."""
    _: KW_ONLY
    top: int = 5
    """Classes for each image."""
    batch_size: int = 64
    weights: Storage | None = None
    """Prepare the model for fast inference, with its experts stored so; mapped: for models larger than the memory."""

    def run(self, progress: Progress | None = None) -> tuple[list[Prediction], list[Unreadable]]:
        """Classes and features of what can be read, and what cannot."""
        paths = find_images(as_list(self.images))
        loaded = load(self.model, device=self.device, image_size=self.image_size, weights=self.weights)
        predictor = Predictor(loaded, top=self.top)
        found = list(predictor.predict_files(paths, batch_size=self.batch_size, workers=self.workers))
        return [p for p in found if isinstance(p, Prediction)], [u for u in found if isinstance(u, Unreadable)]


evaluate = function(Evaluate)
fewshot = function(FewShot)
predict = function(Predict)


def _about(loaded: Loaded, data: dict[str, Source], *, split: str) -> dict[str, Any]:
    """Return the facts that a number needs beside it to mean something later."""
    return {
        "model": str(loaded.saved.folder),
        "model_fingerprint": loaded.saved.fingerprint,
        "preprocessing": asdict(loaded.preprocessing),
        "data": {name: source.fingerprint for name, source in data.items()},
        "split": split,
    }
