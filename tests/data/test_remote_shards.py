"""Shards at addresses: read as exactly as from a disk."""

from pathlib import Path

import fsspec
import numpy as np
import pytest

from softmoe.data import Loader, Transform, TransformConfig, open_source


@pytest.fixture
def shards(tmp_path: Path, write_tar, encoded, picture) -> Path:
    """Two training shards of 6 images and one for validation, with the names of three classes."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for name, first in (("train-0", 0), ("train-1", 6), ("val-0", 12)):
        files = {}
        for number in range(first, first + 6):
            files[f"{number:03}.jpg"] = encoded(picture(number))
            files[f"{number:03}.cls"] = str(number % 3).encode()
        write_tar(folder / f"{name}.tar", files)
    (folder / "classes.json").write_text('["ant", "bee", "cat"]')
    return folder


@pytest.fixture
def address(shards: Path) -> str:
    """Put the shards into fsspec's file system in memory, and return its address."""
    system = fsspec.filesystem("memory")
    for path in shards.iterdir():
        system.pipe_file(f"/bucket/{path.name}", path.read_bytes())
    return "memory://bucket"


@pytest.mark.parametrize("pattern", ["{split}-{0..1}.tar", "{split}-*.tar"])
def test_the_same_source(shards: Path, address: str, pattern: str):
    """Classes, fingerprint and every example are those of the files on disk."""
    there, here = (open_source(f"wds:{place}/{pattern}", "train") for place in (address, shards))
    assert there.fingerprint == here.fingerprint
    assert there.classes == ("ant", "bee", "cat")
    for index in range(12):
        assert there[index].labels == here[index].labels
        assert np.array_equal(there[index].image, here[index].image)


def test_the_same_batches_from_any_step(shards: Path, address: str):
    """The order of a run and a resume in the middle are those of the files on disk."""
    streams = []
    for place, first in ((address, 0), (shards, 0), (address, 2)):
        source = open_source(f"wds:{place}/{{split}}-{{0..1}}.tar?order=shards", "train")
        loader = Loader(source, Transform(TransformConfig(image_size=16), train=True), 4, 0, workers=0)
        batches = loader.batches(first)
        streams.append([next(batches) for _ in range(4 - first)])
    for far, near in zip(streams[0] + streams[2], streams[1] + streams[1][2:], strict=True):
        assert far.indices.tolist() == near.indices.tolist()
        assert bool((far.images == near.images).all())


def test_copied_once(address: str, tmp_path: Path):
    """A second opening reads the copy; a changed file is a new copy; a missing one is named."""
    open_source(f"wds:{address}/{{split}}-0.tar", "val")
    copies = sorted((tmp_path / "cache").iterdir())
    open_source(f"wds:{address}/{{split}}-0.tar", "val")
    assert sorted((tmp_path / "cache").iterdir()) == copies
    with pytest.raises(ValueError, match=r"There is no file memory://bucket/test-0.tar"):
        open_source(f"wds:{address}/{{split}}-0.tar", "test")
