"""Few-shot regression: the reference's numbers, a direct solve, and a loop that leaves one out."""

from importlib import import_module

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from softmoe.evaluate.features import Features
from softmoe.evaluate.ridge import (
    L2_GRID,
    Ridge,
    choose_by_leave_one_out,
    choose_by_test,
    few_shot,
    sample,
)


def features(vectors: np.ndarray, labels: np.ndarray, classes: int) -> Features:
    names = tuple(f"c{i}" for i in range(classes))
    return Features(np.asarray(vectors, np.float32), np.asarray(labels), np.arange(len(labels)), names)


def blobs(per_class: int, classes: int, dim: int, seed: int, spread: float = 1.0) -> Features:
    rng = np.random.default_rng(seed)
    centers = np.random.default_rng(99).normal(size=(classes, dim))
    labels = np.tile(np.arange(classes), per_class)
    return features(centers[labels] + spread * rng.normal(size=(len(labels), dim)), labels, classes)


def direct(x: np.ndarray, labels: np.ndarray, classes: int, l2: float) -> np.ndarray:
    """The normal equations as they stand."""
    z = (x - x.mean(0)) / (x.std(0) + 1e-5)
    z = np.hstack([z, np.full((len(z), 1), 100.0)])
    y = 2.0 * np.eye(classes)[labels] - 1.0
    return np.linalg.solve(z.T @ z + l2 * np.eye(z.shape[1]), z.T @ y)


@pytest.mark.parametrize(("dim", "l2", "slope"), [(1, 0.0, 0.9486893), (10, 10.0, 0.2710640)])
def test_golden_values(dim, l2, slope):
    """The reference's example: four points on a line, two classes; its slopes, and one of two test points right."""
    x = np.zeros((4, dim))
    x[:, 0] = [-1, -2, 2, 1]
    labels = np.array([0, 0, 1, 1])
    ridge = Ridge.fit(x, labels, 2)
    assert ridge.Z_nD[:, 0] == pytest.approx([-0.63245553, -1.26491106, 1.26491106, 0.63245553], abs=1e-4)
    assert ridge.weights(l2)[0] == pytest.approx([-slope, slope], abs=2e-5)
    # the sum of |z| over (the sum of z^2 + l2); the reference's second slope is this in float32, 1.2e-5 off
    assert ridge.weights(l2)[0, 1] == pytest.approx(3.79473319 / (4 + l2), rel=1e-5)
    test = np.zeros((2, dim))
    test[:, 0] = [-1, -2]
    data = {"line": (features(x, labels, 2), features(test, np.array([0, 1]), 2))}
    found = few_shot(data, shots=(2,), seeds=1, protocol="paper", l2_grid=(l2,))
    assert found.numbers() == {"line/2shot": 0.5}


@given(st.integers(2, 30), st.integers(1, 12), st.integers(2, 4), st.sampled_from([2.0**-10, 1.0, 2.0**9, 2.0**19]))
def test_equals_a_direct_solve(rows, dim, classes, l2):
    """More examples than features or fewer: the weights are those of the normal equations."""
    rng = np.random.default_rng([rows, dim, classes])
    x, labels = rng.normal(size=(rows, dim)), rng.integers(0, classes, rows)
    found, expected = Ridge.fit(x, labels, classes).weights(l2), direct(x, labels, classes, l2)
    assert np.allclose(found, expected, rtol=1e-6, atol=1e-8)


@given(st.integers(3, 16), st.integers(1, 12), st.sampled_from([2.0**-6, 1.0, 2.0**6, 2.0**15]))
def test_leave_one_out_equals_the_loop(rows, dim, l2):
    """The closed form gives what solving again without each example gives."""
    rng = np.random.default_rng([rows, dim])
    x, labels = rng.normal(size=(rows, dim)), rng.integers(0, 3, rows)
    ridge = Ridge.fit(x, labels, 3)
    z, y = ridge.Z_nD, ridge.Y_nC
    loop = np.empty_like(y)
    for i in range(rows):
        others = np.arange(rows) != i
        gram = z[others].T @ z[others] + l2 * np.eye(z.shape[1])
        loop[i] = z[i] @ np.linalg.solve(gram, z[others].T @ y[others])
    assert np.allclose(ridge.left_out(l2), loop, rtol=1e-5, atol=1e-6)


def test_one_product_serves_every_penalty():
    """With many examples their product with the eigenvectors is made once: later penalties do not read them again."""
    train = blobs(10, 3, 5, 0)
    ridge = Ridge.fit(train.vectors, train.labels, 3)
    expected = ridge.left_out(2.0)
    ridge.Z_nD.fill(np.nan)
    assert np.array_equal(ridge.left_out(2.0), expected)


def test_scores_in_chunks(monkeypatch):
    """Test features are handled in parts; the result is that of one product."""
    monkeypatch.setattr(import_module("softmoe.evaluate.ridge"), "_CHUNK", 7)
    train, test = blobs(6, 3, 5, 0), blobs(10, 3, 5, 1)
    ridge = Ridge.fit(train.vectors, train.labels, 3)
    z = (test.vectors - ridge.mean_D) / ridge.std_D
    expected = np.hstack([z, np.full((len(z), 1), 100.0)]) @ ridge.weights(4.0)
    assert np.allclose(ridge.scores(test.vectors, 4.0), expected)


def test_samples_are_nested_and_reproducible():
    """The order is a permutation of each class, the same for the same seeds, another for others; as the reference's."""
    labels = np.array([0, 1, 2, 0, 1, 0, 2, 2, 1, 0])
    order = sample(labels, 3, seed=0, sub_seed=1)
    assert [sorted(indices) for indices in order] == [[0, 3, 5, 9], [1, 4, 8], [2, 6, 7]]
    rng = np.random.default_rng(hash((0, 1)) % 2**31)
    for c, indices in enumerate(order):
        assert (indices == rng.permutation(np.where(labels == c)[0])).all()
    many = np.repeat(np.arange(3), 50)
    draws = {tuple(np.concatenate(sample(many, 3, 0, s))) for s in range(4)}
    assert len(draws) == 4


def test_default_does_not_look_at_the_test_set():
    """Other test labels change the accuracy but not the penalty; under the paper's protocol they change the penalty."""
    train, test = blobs(12, 4, 30, 0, 3.0), blobs(40, 4, 30, 1, 3.0)
    shuffled = features(test.vectors, np.random.default_rng(5).permutation(test.labels), 4)
    honest = [few_shot({"a": (train, t)}, shots=(5, 10), seeds=2) for t in (test, shuffled)]
    assert honest[0].l2 == honest[1].l2
    assert honest[0].accuracies != honest[1].accuracies
    paper = [few_shot({"a": (train, t)}, shots=(5, 10), seeds=2, protocol="paper") for t in (test, shuffled)]
    assert paper[0].l2 != paper[1].l2
    assert "without the test set" in honest[0].to_dict()["l2_chosen"]
    assert "test accuracy" in paper[0].to_dict()["l2_chosen"]


def test_paper_protocol_is_the_best_common_rank():
    """One penalty for all data sets and seeds of a number of shots: that of the best mean rank, from all accuracies."""
    data = {name: (blobs(9, 4, 20, s, 3.0), blobs(30, 4, 20, s + 50, 3.0)) for name, s in {"a": 0, "b": 1}.items()}
    grid = L2_GRID[::4]
    found = few_shot(data, shots=(3,), seeds=2, protocol="paper", l2_grid=grid)
    rows = {
        (name, s): [few_shot({name: pair}, shots=(3,), seeds=2, protocol="paper", l2_grid=(l2,)).accuracies[name][3][s]
                    for l2 in grid]
        for name, pair in data.items()
        for s in range(2)
    }  # fmt: skip
    best = choose_by_test([np.array(row) for row in rows.values()])
    assert {l2 for by_shots in found.l2.values() for l2 in by_shots[3]} == {grid[best]}
    for (name, s), row in rows.items():
        assert found.accuracies[name][3][s] == row[best]


def test_choose_by_test():
    """Ranks decide, not accuracies: a large gain on one data set does not outweigh two small ones."""
    rows = [np.array([0.1, 0.2, 0.3]), np.array([0.50, 0.52, 0.51]), np.array([0.90, 0.92, 0.91])]
    assert choose_by_test(rows) == 1


def test_choose_by_leave_one_out():
    """The choice has the best left-out accuracy of the grid."""
    train = blobs(6, 5, 24, 3, 2.0)
    ridge = Ridge.fit(train.vectors, train.labels, 5)
    best = choose_by_leave_one_out(ridge, L2_GRID)
    shares = {l2: (ridge.left_out(l2).argmax(1) == train.labels).mean() for l2 in L2_GRID}
    assert shares[best] == max(shares.values())


def test_one_shot_takes_the_penalty_of_two():
    """Leaving out a class's only example says nothing; the choice is made with two, the weights with one."""
    train, test = blobs(8, 5, 24, 3, 2.0), blobs(40, 5, 24, 4, 2.0)
    found = few_shot({"a": (train, test)}, shots=(1, 2), seeds=2)
    assert found.l2["a"][1] == found.l2["a"][2]
    for s in range(2):
        picked = [indices[0] for indices in sample(train.labels, 5, 0, s)]
        W = direct(train.vectors[picked].astype(np.float64), train.labels[picked], 5, found.l2["a"][1][s])
        x = train.vectors[picked].astype(np.float64)
        z = (test.vectors - x.mean(0)) / (x.std(0) + 1e-5)
        said = (np.hstack([z, np.full((len(z), 1), 100.0)]) @ W).argmax(1)
        assert found.accuracies["a"][1][s] == (said == test.labels).mean()


def test_more_shots_help():
    """On noisy blobs accuracy grows with the shots and ends far above chance."""
    data = {"blobs": (blobs(30, 5, 16, 0, 2.0), blobs(100, 5, 16, 1, 2.0))}
    numbers = few_shot(data, seeds=3).numbers()
    assert numbers["blobs/1shot"] < numbers["blobs/5shot"] < numbers["blobs/25shot"]
    assert numbers["blobs/25shot"] > 0.6


def test_small_classes():
    """A class with fewer examples than shots gives what it has, and the report says how many such classes there are."""
    train = features(np.random.default_rng(0).normal(size=(7, 3)), np.array([0, 0, 0, 0, 1, 1, 1]), 2)
    found = few_shot({"a": (train, train)}, shots=(2, 4), seeds=1)
    assert found.short == {"a": {4: 1}}
    assert found.to_dict()["numbers"].keys() == {"a/2shot", "a/4shot"}


def test_what_is_refused():
    """No shots, a class without examples, different classes and several labels per image."""
    good = blobs(3, 3, 4, 0)
    with pytest.raises(ValueError, match="at least 1"):
        few_shot({"a": (good, good)}, shots=())
    with pytest.raises(ValueError, match="at most 10,000"):
        few_shot({"a": (good, good)}, seeds=10**30)
    lacking = features(good.vectors[good.labels < 2], good.labels[good.labels < 2], 3)
    with pytest.raises(ValueError, match=r"1 of 3 classes have no training example \(the first is 'c2'\)"):
        few_shot({"a": (lacking, good)})
    with pytest.raises(ValueError, match="must have the same classes"):
        few_shot({"a": (good, blobs(3, 4, 4, 0))})
    multi = features(good.vectors, np.eye(3)[good.labels], 3)
    with pytest.raises(ValueError, match="exactly one label"):
        few_shot({"a": (multi, good)})
    with pytest.raises(ValueError, match="must not be negative"):
        Ridge.fit(good.vectors, good.labels, 3).weights(-1.0)
