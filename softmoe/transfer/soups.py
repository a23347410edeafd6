"""Average the weights of several fine-tuned models into one model of the same cost: a model soup.

    soup(["runs/a", "runs/b", "runs/c"], "souped")                   all of them
    greedy_soup(models, "souped", score)                             those that do not lower the score

Weights are read and averaged tensor by tensor, in pieces, so the memory needed is about that of the largest tensor,
however large and many the models are; greedy soups need one model in memory to be scored.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from softmoe.data import evaluation_batches, open_source
from softmoe.evaluate.classify import classification
from softmoe.evaluate.inputs import evaluation_transform, match_classes, random_subset
from softmoe.machine import choose_device, choose_precision
from softmoe.models import VisionTransformer
from softmoe.models.config import weight_facts
from softmoe.storage import SavedModel, load_saved, open_saved, save_tensors
from softmoe.storage.weights import Spec, WeightFiles, check_files
from softmoe.transfer import Soup

PIECE = 1 << 22  # numbers that are averaged at a time, in float64
_OF_TRAINING = ("expert_dropout", "noise_std", "identical_init", "scale_init", "place_init")
"""Options of experts that a trained model's outputs do not depend on; so are the weights of losses, *_weight."""
Score = Callable[[VisionTransformer], float]


@dataclass(frozen=True)
class Souped:
    """A saved soup, and what went into it."""

    saved: SavedModel
    kept: tuple[int, ...]
    """Which of the models went in, best first for greedy soups."""
    scores: tuple[float, ...] = ()
    """The score of each model alone; empty unless the soup is greedy."""
    score: float | None = None
    """The score of the soup; None unless it is greedy."""


class TensorPieces:
    """Reads parts of tensors with plain file reads: the pages of a mapped file would stay in memory."""

    def __init__(self, folder: Path, files: Sequence[str]):
        self._stack = ExitStack()
        self._place: dict[str, tuple[BinaryIO, int]] = {}
        for name in files:
            file = self._stack.enter_context((folder / name).open("rb"))
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            self._place |= {key: (file, 8 + length + facts["data_offsets"][0]) for key, facts in header.items()}

    def __enter__(self) -> "TensorPieces":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def read(self, name: str, dtype: torch.dtype, start: int, stop: int) -> Tensor:
        """Read the numbers from start to stop (not included) of the flat tensor."""
        file, offset = self._place[name]
        data = bytearray((stop - start) * dtype.itemsize)
        file.seek(offset + start * dtype.itemsize)
        if file.readinto(data) != len(data):  # pyright: ignore[reportAttributeAccessIssue]
            raise ValueError(f"{file.name} ends before the tensor {name} does")
        return torch.frombuffer(data, dtype=dtype)


class Ingredients:
    """Several saved models of one architecture, opened to be averaged piece by piece."""

    def __init__(self, models: Sequence[str | Path]):
        if not models:
            raise ValueError("a soup needs at least one model")
        self.models = [open_saved(model) for model in models]
        self._stack = ExitStack()
        try:
            check_alike(self.models)
            for saved in self.models:
                check_files(saved.folder, saved.files, hashes=True)
            self.specs = common_specs(self.models)
            self._pieces = [self._stack.enter_context(TensorPieces(m.folder, list(m.files))) for m in self.models]
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> "Ingredients":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def mean(self, name: str, which: Sequence[int]) -> Tensor:
        """Average one tensor over some of the models, piece by piece: summed in float64, returned in its own type."""
        spec = self.specs[name]
        result = torch.empty(spec.shape, dtype=spec.dtype)
        flat = result.view(-1)
        for start in range(0, flat.numel(), PIECE):
            stop = min(start + PIECE, flat.numel())
            total = torch.zeros(stop - start, dtype=torch.float64)
            for index in which:
                total += self._pieces[index].read(name, spec.dtype, start, stop)
            flat[start:stop] = total / len(which)
        return result

    def write(self, which: Sequence[int], out: str | Path, provenance: dict[str, Any]) -> SavedModel:
        """Save the mean of some of the models, one tensor in memory at a time."""
        first = self.models[which[0]]
        made_of = [{"model": str(self.models[i].folder), "fingerprint": self.models[i].fingerprint} for i in which]
        return save_tensors(
            first.architecture,
            self.specs,
            lambda name: self.mean(name, which),
            out,
            preprocessing=first.preprocessing,
            classes=first.classes,
            provenance=provenance | {"ingredients": made_of},
            tokenizer=first.tokenizer,
        )


def common_specs(models: Sequence[SavedModel]) -> dict[str, Spec]:
    """Return type and shape of every tensor. ValueError unless they are the same in all models."""
    first: dict[str, Spec] = {}
    for saved in models:
        if "base" in saved.provenance:
            raise ValueError(f"{saved.folder} holds adapters, and only whole models can be averaged")
        with WeightFiles(saved.folder, saved.files) as weights:
            specs = {name: weights.spec(name) for name in weights.names}
        first = first or specs
        for name in first | specs:
            if first.get(name) != specs.get(name):
                raise ValueError(
                    f"{models[0].folder} and {saved.folder} cannot be averaged: {name} is "
                    f"{spec_text(first.get(name))} in one and {spec_text(specs.get(name))} in the other"
                )
    return first


def soup(models: Sequence[str | Path], out: str | Path) -> Souped:
    """Save the mean of all `models` (saved folders, runs) in the folder `out`."""
    with Ingredients(models) as ingredients:
        every = tuple(range(len(models)))
        return Souped(ingredients.write(every, out, {"soup": "uniform"}), every)


def greedy_soup(
    models: Sequence[str | Path], out: str | Path, score: Score, device: str | torch.device = "cpu"
) -> Souped:
    """Start from the best model, and add each next best one if the score of the mean does not fall."""
    with Ingredients(models) as ingredients:
        first = ingredients.models[0]
        if first.towers is not None:
            raise ValueError(
                "a greedy soup is chosen by classification, which two towers do not do: leave out --greedy"
            )
        model = load_saved(first, "cpu", verify=False).to(device)
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.load_state_dict(state, assign=True)  # mapped files must not be written to

        def score_of(which: Sequence[int]) -> float:
            with torch.no_grad():
                for name, tensor in state.items():
                    tensor.copy_(ingredients.mean(name, which))
            return score(model)

        scores = tuple(score_of([index]) for index in range(len(models)))
        order = sorted(range(len(models)), key=lambda index: -scores[index])
        kept, best = order[:1], scores[order[0]]
        for index in order[1:]:
            found = score_of([*kept, index])
            if found >= best:
                kept, best = [*kept, index], found
        facts = {"soup": "greedy", "score": best, "scores_alone": list(scores)}
        return Souped(ingredients.write(kept, out, facts), tuple(kept), scores, best)


def run_soup(a: Soup, report: Callable[[str], None]) -> Souped:
    """Average all models, or those that do not lower the accuracy on the data."""
    if not a.greedy:
        return soup(a.models, a.out)
    device = choose_device(a.device)
    return greedy_soup(a.models, a.out, accuracy_on(a, device, report), device)


def accuracy_on(a: Soup, device: torch.device, report: Callable[[str], None]) -> Score:
    """Return a function that measures top-1 on the data, prepared as the first model says."""
    assert a.data is not None
    dtype = choose_precision(a.precision, device, report)
    first = open_saved(a.models[0])
    source = random_subset(open_source(a.data, a.split), a.examples)
    source, _ = match_classes(source, first.classes, first.config.num_classes or 0)
    transform = evaluation_transform(first.preprocessing)

    def score(model: VisionTransformer) -> float:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            return classification(model, evaluation_batches(source, transform, a.batch_size))["top1"]

    return score


def check_alike(models: Sequence[SavedModel]) -> None:
    """Raise a ValueError that names the first difference in architecture or classes, if there is one."""
    first = models[0]
    expected = comparable_facts(first)
    for other in models[1:]:
        found = comparable_facts(other)
        for key in expected | found:
            if expected.get(key) != found.get(key):
                raise ValueError(
                    f"only models of one architecture can be averaged: {key} is {expected.get(key)} in {first.folder} "
                    f"and {found.get(key)} in {other.folder}"
                )
        if first.classes and other.classes and first.classes != other.classes:
            a, b = next(pair for pair in zip(first.classes, other.classes, strict=True) if pair[0] != pair[1])
            raise ValueError(f"{first.folder} and {other.folder} have different classes: {a!r} and {b!r}")


def comparable_facts(saved: SavedModel) -> dict[str, Any]:
    """Return the settings that models must share to be averaged."""
    c = saved.config
    experts = {} if c.moe is None else c.moe.to_dict()
    experts = {k: v for k, v in experts.items() if k not in _OF_TRAINING and not k.endswith("_weight")}
    head = {"num_classes": c.num_classes, "head_blocks": c.head_blocks}
    facts = experts | weight_facts(c) | head | {"image size": c.image_shape}
    if saved.towers is None or saved.tokenizer is None:
        return facts
    text = {f"text {name}": value for name, value in saved.towers.to_dict()["text"].items()}
    return facts | text | {"embed_dim": saved.towers.embed_dim, "tokenizer": saved.tokenizer.facts.sha256[:12]}


def spec_text(spec: Spec | None) -> str:
    return "missing" if spec is None else f"{str(spec.dtype).removeprefix('torch.')} {list(spec.shape)}"
