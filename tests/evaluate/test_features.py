"""Features: computed once for all evaluators, kept whole or not at all."""

import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from softmoe.data import Transform, TransformConfig, open_source
from softmoe.evaluate.features import cache_key, extract, model_hash
from softmoe.evaluate.inputs import FileSource, compute_in, random_subset
from softmoe.evaluate.probes import linear_probe, nearest_neighbors
from softmoe.evaluate.ridge import few_shot
from softmoe.machine import bfloat16_works
from softmoe.models import create_model

TRANSFORM = Transform(TransformConfig(image_size=16, crop="resize"), train=False)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SOFTMOE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def model():
    return create_model("soft_ti8_2e", image_size=16, num_classes=4, width=16, heads=2, mlp_dim=16, depth=2)


@pytest.fixture
def source():
    return open_source("shapes?size=16&classes=downstream&length=150", "val")


class Counter:
    """Counts the images that go through a model."""

    def __init__(self, model):
        self.images = 0
        model.embed.register_forward_hook(self)

    def __call__(self, module, inputs, output):
        self.images += len(inputs[0])


def test_features_are_what_the_head_sees(model, source):
    """Every row is the vector before the head of that image, in order, whatever the batch size."""
    found = extract(model, source, TRANSFORM, batch_size=64)
    assert found.vectors.shape == (150, 16)
    assert found.vectors.dtype == np.float32
    assert found.classes == source.classes
    rng = np.random.default_rng(0)
    for index in (0, 64, 149):
        image = TRANSFORM(source[index].image, rng)
        with torch.no_grad():
            expected = model.eval().forward_head(model.forward_features(image[None]), pre_logits=True)[0]
        assert np.allclose(found.vectors[index], expected.numpy(), atol=1e-5)
        assert found.labels[index] == source[index].labels[0]
    assert (found.indices == np.arange(150)).all()


def test_computed_once_for_all_evaluators(model, source):
    """Few-shot, neighbors and probe, asked one after the other, run the model over each image a single time."""
    counter = Counter(model)

    def pair():
        return extract(model, source, TRANSFORM), extract(model, source, TRANSFORM)

    few_shot({"shapes": pair()}, shots=(1,), seeds=1)
    nearest_neighbors(*pair())
    linear_probe(*pair(), epochs=1)
    assert counter.images == 150


def test_the_cache_is_mapped_and_read_only(model, source):
    """What comes from the cache is equal to what was computed, and cannot be changed by accident."""
    first, second = extract(model, source, TRANSFORM), extract(model, source, TRANSFORM)
    assert np.array_equal(first.vectors, second.vectors)
    assert isinstance(second.vectors, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        second.vectors[0, 0] = 1.0


def test_without_a_cache(model, source, tmp_path):
    """Nothing is left on disk, and the features are the same."""
    kept = extract(model, source, TRANSFORM, cache=tmp_path / "kept")
    free = extract(model, source, TRANSFORM, cache=False)
    assert np.array_equal(kept.vectors, free.vectors)
    assert not (tmp_path / "cache").exists()


def test_the_key_follows_what_matters(model, source):
    """Weights, data, image size and crop change the key; random training settings and where a file lies do not."""
    key = cache_key(model, source, TRANSFORM)
    assert key == cache_key(model, source, Transform(replace(TRANSFORM.config, flip=False, erase=0.5), train=False))
    assert key != cache_key(model, random_subset(source, 10), TRANSFORM)
    for change in ({"image_size": 24}, {"crop": "central"}, {"antialias": False}):
        assert key != cache_key(model, source, Transform(replace(TRANSFORM.config, **change), train=False))
    before = model_hash(model)
    with torch.no_grad():
        model.embed.proj.bias[0] += 1e-3
    assert model_hash(model) != before
    assert key != cache_key(model, source, TRANSFORM)


def test_a_damaged_entry_is_made_again(model, source, tmp_path):
    """A cut file or a lost note does not reach an evaluator."""
    expected = np.array(extract(model, source, TRANSFORM).vectors)
    entry = tmp_path / "cache" / "features" / cache_key(model, source, TRANSFORM)
    data = (entry / "features.npy").read_bytes()
    (entry / "features.npy").write_bytes(data[:-5])
    assert np.array_equal(extract(model, source, TRANSFORM).vectors, expected)
    (entry / "facts.json").unlink()
    assert np.array_equal(extract(model, source, TRANSFORM).vectors, expected)
    assert json.loads((entry / "facts.json").read_text()).keys() == {"sha256"}
    assert len(np.load(entry / "labels.npy")) == 150


@pytest.mark.parametrize("name", ["features.npy", "labels.npy", "indices.npy", "facts.json"])
def test_a_lost_or_emptied_file_is_made_again(name, model, source, tmp_path):
    """Zeros of the right size and files that are missing are noticed, and the features computed anew."""
    found = extract(model, source, TRANSFORM)
    expected = [np.array(part) for part in (found.vectors, found.labels, found.indices)]
    file = tmp_path / "cache" / "features" / cache_key(model, source, TRANSFORM) / name
    for damage in (lambda: file.write_bytes(bytes(file.stat().st_size)), file.unlink):
        damage()
        again = extract(model, source, TRANSFORM)
        for part, right in zip((again.vectors, again.labels, again.indices), expected, strict=True):
            assert np.array_equal(part, right)


@pytest.mark.parametrize("count", [-1, 10**20, "x", None, 3])
def test_the_number_of_rows_is_that_of_the_arrays(count, model, source, tmp_path):
    """The rows are counted: a file beside the arrays that says another length is not believed."""
    expected = np.array(extract(model, source, TRANSFORM).vectors)
    file = tmp_path / "cache" / "features" / cache_key(model, source, TRANSFORM) / "facts.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"count": count}))
    assert np.array_equal(extract(model, source, TRANSFORM).vectors, expected)


@pytest.mark.timeout(120)
def test_an_entry_of_another_kind_is_made_again(model, source, tmp_path):
    """A folder or a pipe with the name of an array, and a file with the name of the entry, are replaced."""
    expected = np.array(extract(model, source, TRANSFORM).vectors)
    entry = tmp_path / "cache" / "features" / cache_key(model, source, TRANSFORM)
    array = entry / "labels.npy"
    for damage in (array.mkdir, lambda: os.mkfifo(array), lambda: array.symlink_to("/dev/zero")):
        array.unlink()
        damage()
        assert np.array_equal(extract(model, source, TRANSFORM).vectors, expected)
    shutil.rmtree(entry)
    entry.write_text("x")
    assert np.array_equal(extract(model, source, TRANSFORM).vectors, expected)


def test_an_interrupted_extraction_leaves_nothing(model, source, tmp_path):
    """If the model fails halfway there is no entry and no rest of one."""
    calls = []

    def fails(module, inputs, output):
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("out of memory")

    model.embed.register_forward_hook(fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        extract(model, source, TRANSFORM, batch_size=50)
    assert list((tmp_path / "cache" / "features").iterdir()) == []


def test_unreadable_images_are_left_out(model, tmp_path):
    """Rows are those of the readable images and the indices say which."""
    from PIL import Image

    paths = [tmp_path / f"{i}.png" for i in range(4)]
    for i, path in enumerate(paths):
        Image.new("RGB", (20, 20), (i * 60, 0, 0)).save(path)
    paths[1].write_text("not an image")
    found = extract(model, FileSource(paths), TRANSFORM, batch_size=3)
    assert found.indices.tolist() == [0, 2, 3]
    assert len(found) == 3
    with pytest.raises(ValueError, match="exactly one label"):
        found.single_labels()
    with pytest.raises(ValueError, match="none of the images could be read"):
        extract(model, FileSource(paths[1:2]), TRANSFORM)
    with pytest.raises(ValueError, match="holds no images"):
        extract(model, FileSource([]), TRANSFORM)


def test_features_must_be_numbers(model, source):
    """A damaged model is not cached."""
    torch.nn.init.constant_(model.embed.proj.bias, float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        extract(model, source, TRANSFORM)


def test_progress(model, source):
    """Reported after every batch, up to all."""
    seen = []
    extract(model, source, TRANSFORM, batch_size=64, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(64, 150), (128, 150), (150, 150)]


def test_a_precision_is_another_entry(model, source):
    """Features in bfloat16 are near those in float32, are not taken for them, and auto on a CPU is float32."""
    if not bfloat16_works():
        pytest.skip("this machine has no working bfloat16")
    exact = extract(model, source, TRANSFORM)
    assert cache_key(compute_in("auto", model), source, TRANSFORM) == cache_key(model, source, TRANSFORM)
    coarse = extract(compute_in("bfloat16", model), source, TRANSFORM)
    assert not np.array_equal(coarse.vectors, exact.vectors)
    assert np.allclose(coarse.vectors, exact.vectors, atol=0.1)
