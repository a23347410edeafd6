"""An evaluation during training says the same on any number of processes."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from parallel.ranks import run_ranks
from parallel.trouble import make_config
from torch import nn
from two_towers import tokenizer, two_towers

from softmoe.data import BrokenImage, Example
from softmoe.train.config import ObjectiveSection
from softmoe.train.data import Data
from softmoe.train.distributed import Team
from softmoe.train.evaluation import Evaluator, classify, evaluate_share, match_pairs
from softmoe.train.objectives import Contrastive

CLASSES = 3
WORDS = ("red", "green", "blue", "large", "small", "round", "square")


class Few:
    """Eleven images with captions; those at odd places, which are all of rank 1 of 2, may have no label."""

    classes, multi_label, fingerprint = ("a", "b", "c"), True, "few"

    def __init__(self, unlabeled: tuple[int, ...] = (), broken: tuple[int, ...] = ()):
        self.unlabeled, self.broken = unlabeled, broken

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Example:
        return self.read(index)

    def read(self, index: int, min_side: int | None = None) -> Example:
        if index in self.broken:
            raise BrokenImage(f"few/{index}", "it is broken")
        pixels = np.random.default_rng(index).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        labels = () if index in self.unlabeled else (index % CLASSES,)
        return Example(pixels, labels, (f"{WORDS[index % 7]} {WORDS[index * 5 % 7]} thing",), f"few/{index}")


def data_of(source: Few, rank: int, world: int, *, examples: int | None = None) -> Data:
    config = make_config(Path("unused"))
    config = replace(config, evaluation=replace(config.evaluation, examples=examples))
    opened: Any = source
    return replace(Data.open(config, 1, 0), val=opened, world=world, rank=rank)


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, CLASSES)).eval()


def numbers_of(
    rank: int, evaluator: Evaluator, sources: list[Few], model: nn.Module, world: int = 2, examples: int | None = None
) -> list[dict[str, float] | str]:
    team = Team(rank, world, group=dist.group.WORLD if world > 1 else None)
    found: list[dict[str, float] | str] = []
    for source in sources:
        try:
            with torch.no_grad():
                found.append(evaluate_share(evaluator, model, data_of(source, rank, world, examples=examples), team))
        except ValueError as error:
            found.append(str(error))
    return found


def mean_pixel(model: nn.Module, batches: Any) -> dict[str, float]:
    """Someone's own evaluator, which does not expect to be given nothing."""
    seen = [batch.images.mean((1, 2, 3)) for batch in batches if len(batch.images)]
    return {"pixel": float(torch.cat(seen).mean())}


def assert_same(found: list[list[dict[str, float] | str]], expected: list[dict[str, float] | str]) -> None:
    for rank in found:
        for mine, theirs in zip(rank, expected, strict=True):
            assert mine == theirs if isinstance(theirs, str) else mine == pytest.approx(theirs, rel=1e-6)


def test_images_without_a_label_are_not_counted():
    """Some, all of one rank, and all of both: the means are over labeled images, and nobody waits for a rank."""
    sources = [Few((0, 1, 4)), Few((1, 3, 5, 7, 9)), Few(tuple(range(11))), Few((1,), (0, 2, 4, 6, 8, 10))]
    expected = numbers_of(0, classify, sources, classifier(), world=1)
    assert isinstance(expected[2], str)
    assert_same(run_ranks(2, numbers_of, classify, sources, classifier()), expected)


def test_an_own_evaluator_is_given_nothing():
    """A rank whose images are all broken does not stop the others."""
    sources = [Few(broken=(1, 3, 5, 7, 9)), Few()]
    expected = numbers_of(0, mean_pixel, sources, classifier(), world=1)
    assert_same(run_ranks(2, numbers_of, mean_pixel, sources, classifier()), expected)


def pairs_of(rank: int, sources: list[Few], world: int, examples: int | None) -> list[dict[str, float] | str]:
    objective = Contrastive(ObjectiveSection(loss="sigmoid"), tokenizer(), 16)
    return numbers_of(rank, partial(match_pairs, objective=objective), sources, two_towers(), world, examples)


@pytest.mark.parametrize(("world", "examples"), [(2, None), (3, 7)])
def test_pairs_meet_those_of_all_processes(world, examples):
    """A caption is looked for in the whole batch, also where processes share it unevenly or images are broken."""
    sources = [Few(), Few(broken=(4, 5, 6, 7)), Few(broken=(1, 3, 5, 7, 9))]
    expected = pairs_of(0, sources, 1, examples)
    assert_same(run_ranks(world, pairs_of, sources, world, examples), expected)
