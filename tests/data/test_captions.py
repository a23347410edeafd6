"""Captions on their way to the model: good, bad and missing ones."""

import json

import numpy as np
import pytest
import torch

from softmoe.data import (
    Captioned,
    Example,
    Loader,
    Source,
    Transform,
    TransformConfig,
    captions_of,
    evaluation_batches,
    open_source,
)
from softmoe.data.texts import some_captions, usable

TRANSFORM = Transform(TransformConfig(image_size=8, crop="resize", flip=False), train=True)
PLAIN = Transform(TransformConfig(image_size=8, crop="resize"), train=False)


@pytest.fixture
def shard(tmp_path, picture, encoded, write_tar):
    """Seven images: two captions, one in json, none, an empty one, not UTF-8, another script, a very long one."""
    texts = {
        "a": b"one\ntwo\n",
        "b": json.dumps({"caption": "from json"}).encode(),
        "c": None,
        "d": b" \n\n",
        "e": b"caf\xe9 noir",
        "f": "猫の写真".encode(),
        "g": b"long " * 2000,
    }
    files = {}
    for k, (key, text) in enumerate(texts.items()):
        files[f"{key}.jpg"] = encoded(picture(k))
        if text is not None:
            files[f"{key}.{'json' if key == 'b' else 'txt'}"] = text
    return write_tar(tmp_path / "train-0.tar", files)


def test_captions_without_images(shard):
    """The same as with them."""
    source = open_source(f"wds:{shard}", "train")
    found = captions_of(source, range(7))
    assert found == [usable(source[k].captions) for k in range(7)]
    assert found[:4] == [("one", "two"), ("from json",), (), ()]
    assert found[4][0].startswith("caf")
    assert found[5] == ("猫の写真",)


def test_shapes_captions_without_images():
    """In blocks as one by one."""
    source = open_source("shapes?size=16", "train")
    assert captions_of(source, [3, 1000, 5]) == [source[k].captions for k in (3, 1000, 5)]


def test_images_without_captions_count_as_broken(shard):
    """Others stand in their place in training; in evaluation they are left out and named."""
    source = Captioned(open_source(f"wds:{shard}", "train"), "x")
    loader = Loader(source, TRANSFORM, 7, max_broken=1.0)
    batch = next(loader.batches())
    assert len(batch) == 7
    assert all(batch.captions)
    assert {name[-1]: reason for name, reason in loader.broken.items()} == dict.fromkeys("cd", "it has no caption")
    left = next(evaluation_batches(source, PLAIN, 7))
    assert left.indices.tolist() == [0, 1, 4, 5, 6]
    assert len(left.broken) == 2


def test_captions_without_text_are_not_drawn():
    """An image with good and empty captions keeps the good ones alone, read one by one or all at once."""

    class Mixed(Source):
        classes, multi_label, fingerprint = (), False, "mixed"

        def __len__(self):
            return 4

        def read(self, index, min_side=None):
            return Example(np.zeros((8, 8, 3), np.uint8), (), ("", "good", "\x00\x07", " "), str(index))

        def read_batch(self, indices, captions=True):
            return [self.read(index) for index in indices]

    source = Captioned(Mixed(), "x")
    assert source.read(0).captions == ("good",)
    batch = source.read_batch([0, 1])
    assert batch is not None
    assert [example.captions for example in batch] == [("good",)] * 2
    assert next(Loader(source, TRANSFORM, 4).batches()).captions == (("good",),) * 4


def test_too_many_images_without_captions(shard):
    """The run ends and says which."""
    loader = Loader(Captioned(open_source(f"wds:{shard}", "train"), "x"), TRANSFORM, 7, max_broken=0.1)
    with pytest.raises(ValueError, match="it has no caption"):
        next(loader.batches())


def test_data_without_any_caption(folder):
    """One sentence at once, not a list of images."""
    with pytest.raises(ValueError, match="the data folder:x has no captions"):
        Captioned(open_source(f"folder:{folder}", "train"), "folder:x")


def test_draws_depend_on_seed_step_and_place_only():
    """Two ranks hold the draws of one; another step or seed has others; all captions get their turn."""
    source = open_source("shapes?size=8", "train")

    def draws(step=0, seed=0, world=1, rank=0, workers=0):
        loader = Loader(source, TRANSFORM, 64, seed, world, rank, workers)
        return next(loader.batches(step)).draws

    whole = draws()
    assert torch.equal(torch.cat([draws(world=2, rank=0), draws(world=2, rank=1)]), whole)
    assert not torch.equal(draws(step=1), whole)
    assert not torch.equal(draws(seed=1), whole)
    assert 16 < int((whole % 2).sum()) < 48
    assert int(whole.min()) >= 0


def test_one_caption_needs_no_draw(tmp_path, picture, encoded, write_tar):
    """And batches for evaluation have none."""
    files = {"a.jpg": encoded(picture(1)), "a.txt": b"one"}
    source = open_source(f"wds:{write_tar(tmp_path / 'a.tar', files)}", "train")
    assert next(Loader(source, TRANSFORM, 2).batches()).draws is None
    assert next(evaluation_batches(open_source("shapes?size=8", "val"), PLAIN, 2)).draws is None


def test_some_captions():
    """At most so many images, always the same ones, no image twice."""
    source = open_source("shapes?size=8&length=50", "train")
    found = list(some_captions(source, 20))
    assert found == list(some_captions(source, 20))
    assert len(found) == 40
    assert len(list(some_captions(source, 1000))) == 100


def test_pairs(tmp_path, picture, encoded):
    """pairs:PATH reads images and the .txt beside them; an image may be without."""
    root = tmp_path / "photos" / "train" / "sub"
    root.mkdir(parents=True)
    (root / "b.jpg").write_bytes(encoded(picture(1)))
    (root / "b.txt").write_bytes(b"a dog\n\nthe same d\xf6g\n")
    (root / "a.PNG").write_bytes(encoded(picture(2), "PNG"))
    source = open_source(f"pairs:{tmp_path / 'photos'}", "train")
    assert [source[k].name for k in range(2)] == ["sub/a.PNG", "sub/b.jpg"]
    assert captions_of(source, range(2)) == [(), ("a dog", "the same d\ufffdg")]
    assert np.array_equal(source[0].image, picture(2))
    before = source.fingerprint
    (root / "a.txt").write_text("a cat")
    assert open_source(f"pairs:{tmp_path / 'photos'}", "train").fingerprint != before
    with pytest.raises(ValueError, match=r"there is no folder .*val"):
        open_source(f"pairs:{tmp_path / 'photos'}", "val")


@pytest.mark.parametrize("other", ["nothing", "caption", "pixels"])
def test_pairs_are_known_by_captions_and_pixels(tmp_path, picture, encoded, other):
    """Variants whose files have the same names and sizes are other data, and a copy is the same."""
    for name in ("one", "two"):
        changed = other if name == "two" else "nothing"
        (tmp_path / name / "train").mkdir(parents=True)
        for k in range(100):
            image = encoded(picture(k + 1000 * (changed == "pixels"), 4, 4), "PPM")
            (tmp_path / name / "train" / f"{k}.ppm").write_bytes(image)
            (tmp_path / name / "train" / f"{k}.txt").write_text("a red cat" if changed == "caption" else "a big cat")
    one, two = (open_source(f"pairs:{tmp_path / name}", "train").fingerprint for name in ("one", "two"))
    assert (one == two) == (other == "nothing")
