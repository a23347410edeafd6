"""Batches that are finished on a device are those that workers finish, and arrive in order."""

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from softmoe.data import (
    Batch,
    Feed,
    Loader,
    Transform,
    TransformConfig,
    batches_on_device,
    evaluation_batches,
    open_source,
    to_tensor,
)
from softmoe.data.feed import finish, results_on_host, to_device
from softmoe.data.loader import Buffers, workers_for

CPU = torch.device("cpu")
SOURCE = "shapes?size=20"


def same(a: Any, b: Any) -> None:
    assert vars(a).keys() == vars(b).keys()
    for name, value in vars(a).items():
        other = getattr(b, name)
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, name


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "options",
    [
        {"crop": "resize", "flip": False},
        {"crop": "inception", "flip": True},
        {"crop": "pad_crop", "flip": True},
        {"crop": "resize", "flip": True, "mixup": 0.8},
        {"crop": "inception", "flip": True, "rand_layers": 1, "erase": 0.5},
        {"crop": "resize", "flip": True, "cutmix": 1.0, "erase": 0.8},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_finished_later_is_finished(options: dict[str, Any], workers: int) -> None:
    """Images, labels and all else of a raw batch, finished where it arrives, are those of a batch made whole, bit for
    bit; and it has a quarter of the bytes."""
    if workers and options["crop"] != "inception":
        pytest.skip("starting workers takes long, and two cases say it")
    source, transform = open_source(SOURCE, "train"), Transform(TransformConfig(16, **options), train=True)
    plain = Loader(source, transform, 6, seed=3, workers=workers).batches(2)
    raw = Loader(source, transform, 6, seed=3, workers=workers, raw=True).batches(2)
    for made, sent in islice(zip(plain, raw, strict=True), 3):
        assert sent.images.dtype == torch.uint8
        assert sent.images.nbytes * 4 == made.images.nbytes
        same(finish(sent, len(source.classes)), made)


def test_evaluation_batches_too() -> None:
    """Raw evaluation batches on a device are the usual ones, the last and shorter one included."""
    source, transform = (
        open_source(f"{SOURCE}&length=10", "val"),
        Transform(TransformConfig(16, "central"), train=False),
    )
    usual = list(evaluation_batches(source, transform, 4))
    found = list(batches_on_device(evaluation_batches(source, transform, 4, raw=True), CPU))
    assert len(usual) == len(found) == 3
    for a, b in zip(usual, found, strict=True):
        same(a, b)


def test_every_level_is_exact() -> None:
    """All 256 levels of a pixel become the same float32 numbers as on the CPU's way."""
    levels = np.arange(256, dtype=np.uint8).repeat(3).reshape(1, 16, 16, 3)
    empty = torch.zeros(1, dtype=torch.int64)
    assert torch.equal(finish(Batch(torch.from_numpy(levels), empty, empty), 0).images, to_tensor(levels))


def test_copies_are_not_waited_for_on_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """To mps torch would copy from memory that the batch has given back (pytorch/pytorch#139550)."""
    told: set[tuple[str, bool]] = set()
    monkeypatch.setattr(torch.Tensor, "to", lambda t, device, non_blocking: told.add((device.type, non_blocking)) or t)
    for name in ("cuda", "mps"):
        to_device(Batch(torch.zeros(2, 4, 4, 3), torch.zeros(2), torch.arange(2)), torch.device(name))
    assert told == {("cuda", True), ("mps", False)}


def test_a_feed_says_why_there_is_no_batch() -> None:
    """The error of a source is returned by `fetch`, after all batches before it were given in order."""

    def batches():
        yield from (next(made) for _ in range(2))
        raise OSError("the disk is gone")

    made = evaluation_batches(open_source(f"{SOURCE}&length=8", "val"), Transform(TransformConfig(16), train=False), 2)
    feed = Feed(batches(), CPU)
    for first in (0, 2):
        assert feed.fetch() is None
        assert feed.take().indices.tolist() == [first, first + 1]
    assert str(feed.fetch()) == "the disk is gone"


def test_results_on_the_host_stay_in_order() -> None:
    """Nothing is lost or held back of what is computed on a CPU."""
    rows = [(torch.tensor([k]), torch.tensor(-k)) for k in range(3)]
    assert [(int(a), int(b)) for a, b in results_on_host(rows)] == [(0, 0), (1, -1), (2, -2)]
    assert list(results_on_host([])) == []


@pytest.mark.parametrize(
    ("device", "cores", "processes", "workers"),
    [("cpu", 8, 1, 1), ("cuda", 8, 1, 7), ("cuda", 8, 4, 1), ("cuda", 1, 1, 1), ("cuda", 128, 1, 16)],
)
def test_workers_by_the_machine(
    monkeypatch: pytest.MonkeyPatch, device: str, cores: int, processes: int, workers: int
) -> None:
    """Where a CPU trains, one; for a GPU all cores of the process but one, between 1 and 16."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    assert workers_for(device) == workers


def test_waiting_batches_have_a_bound() -> None:
    """As many batches wait as the bytes allow: first fewer ahead of each worker, then fewer workers, at least one."""
    found = [Buffers.within(limit, workers=8, prefetch=4, batch_bytes=100) for limit in (10_000, 2_000, 400, 1)]
    assert [(b.workers, b.prefetch) for b in found] == [(8, 4), (8, 1), (2, 1), (1, 1)]
    assert all(b.bytes <= limit for b, limit in zip(found, (10_000, 2_000, 400), strict=False))
