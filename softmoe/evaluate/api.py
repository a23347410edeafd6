"""Commands as options: evaluate, few-shot, predict, and with texts retrieve, zero-shot and search.

A command is a frozen dataclass: its fields are the options, in Python and on the command line, and `run` does it. This
file loads without torch, so that the command line can say at once what is wrong with a command.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from softmoe.machine import Precision

if TYPE_CHECKING:
    from softmoe.evaluate.classify import Prediction, Unreadable
    from softmoe.evaluate.features import Progress
    from softmoe.evaluate.find import Hits

Names = str | Path | Sequence[str | Path]
"""One file, folder or pattern, or several."""
Loss = Literal["softmax", "sigmoid"]
Storage = Literal["float32", "float16", "bfloat16", "int8", "int8_dynamic", "mapped"]
Protocol = Literal["loo", "paper"]
SHOTS = (1, 5, 10, 25)
Options = ParamSpec("Options")
Result = TypeVar("Result", covariant=True)


@dataclass(frozen=True, kw_only=True)
class OnDevice:
    """Say where a model runs and with which numbers: the options of every command that runs one."""

    device: str = "auto"
    """auto (a CUDA device if there is one, else the processor), cpu, cuda, cuda:1 or mps."""
    precision: Precision = "auto"
    """What products are computed in: auto (bfloat16 on a GPU that has it, else float32), bfloat16, float32 (TF32 on a
    GPU), exact."""


@dataclass(frozen=True, kw_only=True)
class OverImages(OnDevice):
    """Say how a saved model runs over images: the options of every command that does."""

    image_size: int | tuple[int, int] | None = None
    """Pixels, or HEIGHTxWIDTH; the size the model was saved with if not given."""
    batch_size: int = 128
    workers: int = 0
    """Processes that read images."""

    @property
    def model_options(self) -> dict[str, Any]:
        """Return arguments for `load` and `load_towers`."""
        return {"device": self.device, "image_size": self.image_size, "precision": self.precision}


@dataclass(frozen=True, kw_only=True)
class OthersWeights:
    """Tell what a file of others' weights does not; `MODEL?mean=0.5&std=0.5` says the same."""

    mean: str | None = None
    """Others' weights: mean of the pixels in [0, 1] they were trained with, as 0.5 or 0.485,0.456,0.406."""
    std: str | None = None
    """Others' weights: deviation of those pixels, as 0.5 or 0.229,0.224,0.225."""
    heads: int | None = None
    """Others' weights: heads of attention, if they cannot be told from the width."""
    activation: str | None = None
    """Others' weights: gelu, gelu_tanh (SigLIP) or quick_gelu (OpenAI's CLIP)."""

    @property
    def foreign_options(self) -> dict[str, Any]:
        """Return what the user states of the weights, the argument `foreign_options` of `load`."""
        return {f.name: getattr(self, f.name) for f in fields(OthersWeights)}


@dataclass(frozen=True)
class OneModel(OthersWeights):
    """Name the model of a command that takes others' weights too."""

    model: str | Path
    """A saved model, a run, a Hub id (user/name), or others' weights: a .safetensors or .npz file, or their folder."""


@dataclass(frozen=True)
class TwoTowerModel:
    """Name the model of a command for images and texts."""

    model: str | Path
    """Folder of a saved model with two towers or of its run, or a Hub id (user/name)."""


@dataclass(frozen=True, kw_only=True)
class OverFeatures(OverImages):
    """Say how features are computed, and if they are kept for the next time."""

    cache: bool = True
    """Whether features are kept in $SOFTMOE_CACHE (or ~/.cache/softmoe); with --no-cache they are not."""

    def feature_options(self, progress: Progress | None) -> dict:
        """Return arguments for `extract`."""
        names = ("batch_size", "workers", "cache")
        return {name: getattr(self, name) for name in names} | {"progress": progress}


class Command(typing.Protocol[Result]):
    def run(self, progress: Progress | None = None) -> Result: ...


def function(command: Callable[Options, Command[Result]]) -> Callable[Options, Result]:
    """Return the command as a function of its options."""

    def call(*args: Options.args, **options: Options.kwargs) -> Result:
        made = command(*args, **options)
        if not isinstance(model := getattr(made, "model", None), str | Path):
            what = f"model is a path or a Hub id, not a {type(model).__name__}"
            raise ValueError(f"{what}: save it first with softmoe.save_pretrained(model, FOLDER)")
        return made.run()

    call.__doc__ = f"{command.__doc__} Options are the fields of {getattr(command, '__name__', 'the command')}."
    return call


def as_list(names: Names) -> list[str]:
    """Return the names as text. ValueError for other things, such as arrays."""
    given = list(names) if isinstance(names, Iterable) and not isinstance(names, str | Path) else [names]
    if wrong := [type(name).__name__ for name in given if not isinstance(name, str | Path)]:
        how = "save it as a file, or call the model itself, softmoe.from_pretrained(MODEL), with a tensor"
        raise ValueError(f"images are paths, folders or patterns, not a {wrong[0]}: {how}")
    return [str(name) for name in given]


@dataclass(frozen=True)
class Evaluate(OneModel, OverImages):
    """Accuracy, loss and calibration of a saved model, with a row for every class."""

    data: str
    """Source of images: a folder with [SPLIT/]CLASS/IMAGE, or shapes, wds:PATTERN, hf:NAME, idx:PATH, digits."""
    _: KW_ONLY
    split: str = "val"
    labels: str | Path | None = None
    """JSON of labels to use instead, several per image: a list by image number (ReaL's form) or an object by name."""
    examples: int | None = None
    """Evaluate on so many images only, chosen at random (always the same ones)."""
    loss: Loss | None = None
    """softmax or sigmoid, which also decides what confidence means; None is the loss the model was trained with."""
    weights: Storage | None = None
    """Prepare the model for fast inference, with its experts stored so; mapped: for models larger than the memory."""
    agreement: bool = False
    """With --weights: also run the model as saved, and say how often both put the same class first."""

    def run(self, progress: Progress | None = None) -> dict[str, Any]:
        """Return named numbers and what they were measured on, as plain values for JSON."""
        from softmoe.evaluate.classify import run_evaluate

        return run_evaluate(self, progress)


@dataclass(frozen=True)
class FewShot(OneModel, OverFeatures):
    """Few-shot accuracy of a saved model's features, by ridge regression in closed form."""

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
    """Take the shots from so many training images, chosen at random, instead of from all (of pictures drawn without
    end: four times as many as the shots)."""
    test_examples: int | None = None

    def run(self, progress: Progress | None = None) -> dict[str, Any]:
        """Return accuracies by data and number of shots; nearest neighbors and a probe if asked."""
        from softmoe.evaluate.probes import run_fewshot

        return run_fewshot(self, progress)


@dataclass(frozen=True)
class Predict(OneModel, OverImages):
    """The likeliest classes of images."""

    images: Names
    """Image files, folders (with all below them) and patterns."""
    _: KW_ONLY
    top: int = 5
    """Classes for each image."""
    batch_size: int = 64
    weights: Storage | None = None
    """Prepare the model for fast inference, with its experts stored so; mapped: for models larger than the memory."""

    def run(self, progress: Progress | None = None) -> tuple[list[Prediction], list[Unreadable]]:
        """Return classes and features of the images that can be read, and the files that cannot."""
        from softmoe.evaluate.classify import run_predict

        return run_predict(self, progress)


@dataclass(frozen=True)
class Retrieve(TwoTowerModel, OverFeatures):
    """Recall at 1, 5 and 10 of two towers, both ways, among all images and all captions of the data."""

    data: str
    """Source of images with captions: wds:PATTERN, pairs:PATH, hf:NAME, shapes."""
    _: KW_ONLY
    split: str = "val"
    examples: int | None = None
    """Search among so many images only, chosen at random (always the same ones)."""

    def run(self, progress: Progress | None = None) -> dict[str, Any]:
        """Return recalls with all captions of every image. Images without a caption are left out."""
        from softmoe.evaluate.towers import run_retrieve

        return run_retrieve(self, progress)


@dataclass(frozen=True)
class ZeroShot(TwoTowerModel, OverFeatures):
    """Accuracy of two towers that know the classes by name only."""

    data: str
    """Source of images with classes: a folder with [SPLIT/]CLASS/IMAGE, or shapes, wds:PATTERN, hf:NAME."""
    _: KW_ONLY
    split: str = "val"
    classes: str | Path | None = None
    """JSON with names for the classes: a list in the order of the labels, or an object by the data's names."""
    templates: tuple[str, ...] | None = None
    """Sentences with {} where the name goes, or one .txt file with one a line."""
    examples: int | None = None
    """Evaluate on so many images only, chosen at random (always the same ones)."""

    def run(self, progress: Progress | None = None) -> dict[str, Any]:
        """Return top-1 and top-5, the chance of a guess, and what was measured."""
        from softmoe.evaluate.towers import run_zeroshot

        return run_zeroshot(self, progress)


@dataclass(frozen=True)
class Search(TwoTowerModel, OverFeatures):
    """Find images by a sentence.

    The first search of a folder computes its features; later ones, for any text, read them from the cache.
    """

    query: str
    """The sentence, in quotes."""
    images: Names
    """Folders (with all below them), image files and patterns."""
    _: KW_ONLY
    top: int = 24
    """Images to show."""
    batch_size: int = 64

    def run(self, progress: Progress | None = None) -> Hits:
        """Return the `top` images that are nearest to the text; equal ones in order of name."""
        from softmoe.evaluate.find import run_search

        return run_search(self, progress)


evaluate = function(Evaluate)
fewshot = function(FewShot)
predict = function(Predict)
retrieve = function(Retrieve)
zeroshot = function(ZeroShot)
search = function(Search)
