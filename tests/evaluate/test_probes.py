"""Nearest neighbors against a loop; the linear probe against what it must find."""

import numpy as np
import pytest

from softmoe.evaluate.features import Features
from softmoe.evaluate.probes import linear_probe, nearest_neighbors


def blobs(rows: int, classes: int, dim: int, seed: int, spread: float) -> Features:
    rng = np.random.default_rng(seed)
    centers = np.random.default_rng(99).normal(size=(classes, dim))
    labels = rng.integers(0, classes, rows)
    vectors = (centers[labels] + spread * rng.normal(size=(rows, dim))).astype(np.float32)
    vectors.flags.writeable = False  # as mapped features are
    return Features(vectors, labels, np.arange(rows), tuple(map(str, range(classes))))


@pytest.mark.parametrize(("neighbors", "temperature"), [(1, 0.07), (5, 0.07), (5, None), (500, 0.1)])
def test_neighbors_against_a_loop(neighbors, temperature, monkeypatch):
    """The vote of the most similar training images, in chunks of any size."""
    monkeypatch.setattr("softmoe.evaluate.probes._CHUNK", 17)
    train, test = blobs(60, 7, 5, 0, 1.0), blobs(40, 7, 5, 1, 1.0)
    right1 = right5 = 0
    for row, label in zip(test.vectors, test.labels, strict=True):
        cosine = [float(row @ x / np.linalg.norm(row) / np.linalg.norm(x)) for x in train.vectors]
        votes = [0.0] * 7
        for i in sorted(range(60), key=lambda i: -cosine[i])[:neighbors]:
            votes[train.labels[i]] += 1.0 if temperature is None else np.exp(cosine[i] / temperature)
        order = sorted(range(7), key=lambda c: -votes[c])
        right1 += order[0] == label
        right5 += label in order[:5]
    found = nearest_neighbors(train, test, neighbors=neighbors, temperature=temperature)
    assert found == pytest.approx({"top1": right1 / 40, "top5": right5 / 40})


def test_a_point_is_its_own_neighbor():
    """With one neighbor the training set is classified without error; with five, which outvote a point, it is not."""
    train = blobs(50, 4, 6, 0, 3.0)
    assert nearest_neighbors(train, train, neighbors=1, temperature=None)["top1"] == 1.0
    assert nearest_neighbors(train, train, neighbors=5, temperature=None)["top1"] < 1.0
    with pytest.raises(ValueError, match="at least 1"):
        nearest_neighbors(train, train, neighbors=0)


def test_probe_learns():
    """Separable classes are separated; overlapping ones come near the best possible; the rate is one of those given."""
    easy = linear_probe(blobs(400, 4, 10, 0, 0.1), blobs(200, 4, 10, 1, 0.1), epochs=5)
    assert easy["top1"] == 1.0
    hard = linear_probe(blobs(2000, 4, 10, 0, 2.0), blobs(500, 4, 10, 1, 2.0), epochs=10, rates=(0.01, 0.1))
    centers = np.random.default_rng(99).normal(size=(4, 10))
    test = blobs(500, 4, 10, 1, 2.0)
    best = (((test.vectors[:, None] - centers) ** 2).sum(-1).argmin(1) == test.labels).mean()
    assert hard["top1"] > best - 0.05
    assert hard["rate"] in (0.01, 0.1)
    assert hard["top5"] == 1.0


def test_probe_is_reproducible_and_chooses_without_the_test_set():
    """The same seed gives the same numbers; other test labels do not change the rate; a rate that diverges loses."""
    train, test = blobs(300, 3, 8, 0, 1.5), blobs(100, 3, 8, 1, 1.5)
    first, second = linear_probe(train, test, epochs=3), linear_probe(train, test, epochs=3)
    assert first == second
    wrong = Features(test.vectors, (test.labels + 1) % 3, test.indices, test.classes)
    assert linear_probe(train, wrong, epochs=3)["rate"] == first["rate"]
    assert linear_probe(train, test, epochs=3, rates=(0.03, 1e38))["rate"] == 0.03


def test_probe_refuses():
    """Too few images and senseless settings."""
    one = blobs(1, 2, 3, 0, 1.0)
    with pytest.raises(ValueError, match="at least two"):
        linear_probe(one, one)
    with pytest.raises(ValueError, match="must be at least 1"):
        linear_probe(blobs(9, 2, 3, 0, 1.0), one, epochs=0)
