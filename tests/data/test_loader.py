"""Batches: the same with any number of workers, from any step, on any number of processes."""

import logging
import multiprocessing
import os
import signal
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pytest
import torch

from softmoe.data import (
    Example,
    Loader,
    TooManyBroken,
    Transform,
    TransformConfig,
    WorkerDied,
    evaluation_batches,
    open_source,
)
from softmoe.evaluate.inputs import Relabeled, Subset
from softmoe.train.config import DataSection

SMALL = TransformConfig(32, "pad_crop")


def _same(a, b):
    assert torch.equal(a.images, b.images)
    assert torch.equal(a.labels, b.labels)
    assert torch.equal(a.indices, b.indices)
    assert (a.captions, a.broken) == (b.captions, b.broken)


@dataclass
class Few:
    """Ten gray images; what is listed is unreadable or has other labels."""

    broken: tuple[int, ...] = ()
    several: bool = False
    classes: tuple[str, ...] = ("a", "b", "c")
    fingerprint: str = "few"
    odd: tuple[int, ...] = ()

    @property
    def multi_label(self):
        return self.several

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return self.read(index)

    def read(self, index, min_side=None):
        from softmoe.data import BrokenImage

        if index in self.broken:
            raise BrokenImage(f"few/{index}", "it is broken")
        labels = (0, 2) if self.several else (7,) if index in self.odd else (index % 3,)
        return Example(np.full((8, 8, 3), index * 20, dtype=np.uint8), labels, name=f"few/{index}")


PLAIN = Transform(TransformConfig(8, "resize", flip=False), True)


def test_workers_change_nothing(folder):
    """0, 1 and 2 workers make identical batches bit for bit, with every augmentation on, decoding included."""
    config = TransformConfig(16, rand_layers=2, erase=0.5, mixup=0.5)
    source = open_source(f"folder:{folder}", "train")
    batches = {}
    for workers in (0, 1, 2):
        stream = Loader(source, Transform(config, True), 6, seed=3, workers=workers).batches(2)
        batches[workers] = list(islice(stream, 4))
        stream.close()
    for workers in (1, 2):
        for a, b in zip(batches[0], batches[workers], strict=True):
            _same(a, b)


def test_resume_equals_continuing():
    """From step 5 a new loader gives what the first would have given."""
    source = open_source("shapes?length=50", "train")
    transform = Transform(SMALL, True)
    whole = list(islice(Loader(source, transform, 8, seed=1).batches(), 9))
    resumed = list(islice(Loader(source, transform, 8, seed=1).batches(5), 4))
    for a, b in zip(whole[5:], resumed, strict=True):
        _same(a, b)
    other = next(Loader(source, transform, 8, seed=2).batches())
    assert not torch.equal(whole[0].images, other.images)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_the_batch(world):
    """The ranks' batches together are the batch of one process, augmentation included."""
    source, transform = open_source("shapes", "train"), Transform(SMALL, True)
    whole = next(Loader(source, transform, 8).batches(3))
    shares = [next(Loader(source, transform, 8, world=world, rank=r).batches(3)) for r in range(world)]
    assert torch.equal(torch.cat([s.images for s in shares]), whole.images)
    assert torch.equal(torch.cat([s.labels for s in shares]), whole.labels)


def test_fast_reading_equals_plain():
    """A source read in batches gives what it gives example by example."""
    source = open_source("shapes", "train")

    @dataclass
    class Plain:
        classes = source.classes
        multi_label = False
        fingerprint = source.fingerprint

        def __len__(self):
            return len(source)

        def read(self, index, min_side=None):
            return source.read(index)

        __getitem__ = read

    for a, b in zip(
        islice(Loader(source, Transform(SMALL, True), 8).batches(), 2),
        islice(Loader(Plain(), Transform(SMALL, True), 8).batches(), 2),
        strict=True,
    ):
        _same(a, b)


def test_reduced_decoding_keeps_the_crop(tmp_path, picture, encoded):
    """A large JPEG decoded small gives the same crop as decoded whole, up to resampling."""
    for k in range(4):
        path = tmp_path / "set/train/c" / f"{k}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(picture(k, 600, 800), quality=95))
    source = open_source(f"folder:{tmp_path}/set", "train")
    shapes = []

    class Whole:
        classes, multi_label, fingerprint = source.classes, False, ""

        def __len__(self):
            return 4

        def read(self, index, min_side=None):
            small = source.read(index, min_side)
            shapes.append(small.image.shape)
            return source.read(index)

        __getitem__ = read

    transform = Transform(TransformConfig(32), True)
    small = next(Loader(source, transform, 4).batches())
    whole = next(Loader(Whole(), transform, 4).batches())
    assert min(s[0] for s in shapes) < 600
    # the crop was chosen from the stored size in both
    assert (small.images - whole.images).abs().mean() < 0.02


def test_captions_are_left_out_where_nobody_asks():
    """All else is the same, also for a part of a source and for one whose labels have other numbers."""
    source = open_source("shapes", "train")
    for one in (source, Subset(source, np.arange(50)), Relabeled(source, source.classes, tuple(range(288)))):
        with_them, without = (
            next(Loader(one, Transform(SMALL, train=True), 8, captions=captions).batches())
            for captions in (True, False)
        )
        assert [len(captions) for captions in with_them.captions] == [2] * 8
        assert (without.captions, without.draws) == ((), None)
        assert torch.equal(with_them.images, without.images)
        assert torch.equal(with_them.labels, without.labels)
        evaluated = next(evaluation_batches(one, Transform(SMALL, train=False), 8, captions=False))
        assert evaluated.captions == ()


def test_batch_contents(folder):
    """Shapes, types and ranges are as stated."""
    batch = next(
        Loader(open_source(f"folder:{folder}", "train"), Transform(TransformConfig((16, 24)), True), 6).batches()
    )
    assert batch.images.shape == (6, 3, 16, 24)
    assert batch.images.dtype == torch.float32
    assert batch.images.is_contiguous()
    assert -1 <= batch.images.min() <= batch.images.max() <= 1
    assert batch.labels.dtype == batch.indices.dtype == torch.int64
    assert torch.equal(batch.labels, batch.indices // 5)
    assert len(batch) == len(batch.captions) == 6


def test_multi_label_and_mixup():
    """Several labels become multi-hot rows; mixup makes rows that sum to one."""
    batch = next(Loader(Few(several=True), PLAIN, 4).batches())
    assert torch.equal(batch.labels, torch.tensor([[1.0, 0.0, 1.0]]).repeat(4, 1))
    mixed = Loader(Few(), Transform(TransformConfig(8, "resize", mixup=0.4), True), 4)
    for batch in islice(mixed.batches(), 3):
        assert batch.labels.shape == (4, 3)
        torch.testing.assert_close(batch.labels.sum(1), torch.ones(4))
    plain = next(Loader(Few(), PLAIN, 4).batches())
    one = next(Loader(Few(), Transform(TransformConfig(8, "resize", flip=False, mixup=1e-3), True), 4).batches())
    torch.testing.assert_close(one.images, plain.images, atol=0.05, rtol=0)  # weights near (1, 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_images_are_replaced(workers, caplog):
    """An unreadable image is replaced by the same other one each time, and named once."""
    loader = Loader(Few(broken=(4,)), PLAIN, 5, max_broken=0.2, workers=workers)
    with caplog.at_level(logging.WARNING, "softmoe.data"):
        stream = loader.batches()
        batches = list(islice(stream, 6))
        stream.close()
    assert sum("few/4" in r.getMessage() for r in caplog.records) == 1
    assert loader.broken == {"few/4": "it is broken"}
    assert sum(len(b.broken) for b in batches) >= 3  # once per epoch at least
    assert all(len(b) == 5 and 4 not in b.indices for b in batches)
    for a, b in zip(batches, islice(Loader(Few(broken=(4,)), PLAIN, 5, max_broken=0.2).batches(), 6), strict=True):
        _same(a, b)


def test_the_allowed_share_is_that_of_a_run():
    """A Loader made by hand allows as many broken images as one that training makes."""
    assert Loader(Few(), PLAIN, 5).max_broken == DataSection().max_broken


def test_too_many_broken():
    """Above the share the run stops with the list; all broken stops at once."""
    with pytest.raises(
        TooManyBroken, match=r"2 of 10 .*0\.1 \(max_broken, --data\.max-broken of a run\)(.|\n)*few/[37]: it is broken"
    ):
        list(islice(Loader(Few(broken=(3, 7)), PLAIN, 5, max_broken=0.1).batches(), 20))
    with pytest.raises(TooManyBroken, match="in a row"):
        next(Loader(Few(broken=tuple(range(10))), PLAIN, 5, max_broken=1.0).batches())


@pytest.mark.parametrize("workers", [0, 1])
def test_wrong_label_is_named(workers):
    """A label outside the classes is an error with the example's name, as it was raised, from a worker too."""
    with pytest.raises(ValueError, match=r"^The example few/\d has the labels \[7\].* one of the 3 classes, 0 to 2"):
        list(islice(Loader(Few(odd=tuple(range(10))), PLAIN, 5, workers=workers).batches(), 4))


@pytest.mark.parametrize(
    ("world", "batch_size", "workers"), [(1, 4, 0), (1, 4, 2), (2, 4, 0), (4, 4, 0), (1, 10, 0), (3, 12, 0), (3, 4, 0)]
)
def test_evaluation_sees_each_once(world, batch_size, workers):
    """Over all ranks every example comes once, and all ranks take the same number of steps."""
    ranks = [list(evaluation_batches(Few(), PLAIN, batch_size, world, r, workers)) for r in range(world)]
    seen = [i for batches in ranks for b in batches for i in b.indices.tolist()]
    assert sorted(seen) == list(range(10))
    assert len({len(batches) for batches in ranks}) == 1
    assert all(b.images.shape[1:] == (3, 8, 8) for batches in ranks for b in batches)


def test_workers_have_a_bound():
    """More than a machine can hold are refused before one starts, and evaluation starts no more than it has batches."""
    for make in (Loader, evaluation_batches):
        with pytest.raises(ValueError, match="processes that read images: at most"):
            make(Few(), PLAIN, 5, workers=100_000)
    batches = evaluation_batches(Few(), PLAIN, 5, workers=6)
    next(batches)
    assert len(multiprocessing.active_children()) == 2
    assert len(list(batches)) == 1


def test_evaluation_leaves_out_broken():
    """A broken image is not replaced in evaluation: it is left out and listed."""
    batches = list(evaluation_batches(Few(broken=(2, 9)), PLAIN, 4))
    assert [i for b in batches for i in b.indices.tolist()] == [0, 1, 3, 4, 5, 6, 7, 8]
    assert [name for b in batches for name, _ in b.broken] == ["few/2", "few/9"]


def test_shard_order_is_used(tmp_path, picture, encoded, write_tar):
    """A source with blocks is read a few shards at a time, and resumes."""
    for s in range(6):
        write_tar(tmp_path / f"{s}.tar", {f"{s}{k}.png": encoded(picture(s * 9 + k, 8, 8), "PNG") for k in range(5)})
    source = open_source(f"wds:{tmp_path}/*.tar?order=shards&mix=2", "train")
    batches = list(islice(Loader(source, PLAIN, 10).batches(), 3))
    assert all(len({i // 5 for i in b.indices.tolist()}) == 2 for b in batches)
    assert sorted(i for b in batches for i in b.indices.tolist()) == list(range(30))
    assert batches[0].labels.tolist() == [-1] * 10
    _same(next(Loader(source, PLAIN, 10).batches(2)), batches[2])


def test_mistakes():
    """What cannot work is said before the first batch."""
    with pytest.raises(ValueError, match="multiple of 3"):
        Loader(Few(), PLAIN, 10, world=3)
    with pytest.raises(ValueError, match="workers"):
        Loader(Few(), PLAIN, 10, workers=-1)
    with pytest.raises(ValueError, match="empty"):
        Loader(type("None_", (Few,), {"__len__": lambda self: 0})(), PLAIN, 2)
    with pytest.raises(ValueError, match="set both to 0"):
        Loader(Few(classes=()), Transform(TransformConfig(8, mixup=0.1), True), 2)


class Deadly(Few):
    """Kills the process that reads example 3, as the kernel does when memory runs out."""

    def read(self, index, min_side=None):
        if index == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(index)


def test_dead_worker_is_explained():
    """A killed worker is one clear sentence, not a hang."""
    with pytest.raises(WorkerDied, match=r"lack of memory.*fewer workers than 1"):
        list(islice(Loader(Deadly(), PLAIN, 5, workers=1).batches(), 4))
