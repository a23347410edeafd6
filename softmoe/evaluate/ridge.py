"""Few-shot classification by ridge regression in closed form: the paper's measure of a representation.

Letters: n examples, D features, C classes.

k examples of every class, their features standardized, and a large constant feature as bias give Z (n, D); targets Y
(n, C) are +1 for the class and -1 elsewhere. The classifier is

    W = (Z'Z + l2 I)^-1 Z'Y  =  Z' (ZZ' + l2 I)^-1 Y

From one eigendecomposition of the smaller of Z'Z and ZZ' follow the solutions for every l2, and their predictions
with each example left out. With K = ZZ' and the inverse G = (K + l2 I)^-1, example i predicted by the others is

    y_i - (G Y)_i / G_ii

What remains to be chosen is l2:

    loo      by accuracy with each training example left out in turn; the test set is not looked at (our default).
             One shot leaves nothing of a class when its example is left out, so its l2 comes from two shots: a second
             training image of each class helps to choose this one number, and nothing else
    paper    by test accuracy: for each number of shots the l2 whose rank, averaged over data sets and seeds, is best
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from softmoe.evaluate.api import SHOTS, Protocol
from softmoe.evaluate.features import Features

L2_GRID = tuple(2.0**i for i in range(-10, 20))
BIAS = 100.0
"""The constant feature is so large that the penalty hardly touches its weight."""
_EPS = 1e-5  # of the standard deviation, for features that do not vary
_CHUNK = 8192  # test rows at a time


@dataclass(frozen=True)
class Ridge:
    """A ridge regression by its eigendecomposition, from which the solution of every l2 takes two products."""

    mean_D: np.ndarray
    std_D: np.ndarray
    Z_nD: np.ndarray
    Y_nC: np.ndarray
    eigenvalues_r: np.ndarray
    vectors: np.ndarray
    """Eigenvectors of Z'Z (D, D) if there are at least as many examples as features, else of ZZ' (n, n)."""

    @classmethod
    def fit(cls, x_nD: np.ndarray, labels_n: np.ndarray, classes: int) -> "Ridge":
        x_nD = np.asarray(x_nD, dtype=np.float64)
        mean_D, std_D = x_nD.mean(0), x_nD.std(0) + _EPS
        Z_nD = _with_bias((x_nD - mean_D) / std_D)
        Y_nC = np.where(labels_n[:, None] == np.arange(classes), 1.0, -1.0)
        gram = Z_nD.T @ Z_nD if _tall(Z_nD) else Z_nD @ Z_nD.T
        eigenvalues, vectors = np.linalg.eigh(gram)
        return cls(mean_D, std_D, Z_nD, Y_nC, np.maximum(eigenvalues, 0.0), vectors)

    def weights(self, l2: float) -> np.ndarray:
        """Return the weights (D, C), the bias last."""
        Q, inverse_r = self.vectors, self._inverse(l2)
        if _tall(self.Z_nD):
            return Q @ (inverse_r[:, None] * (Q.T @ (self.Z_nD.T @ self.Y_nC)))
        return self.Z_nD.T @ (Q @ (inverse_r[:, None] * (Q.T @ self.Y_nC)))

    def scores(self, x_tD: np.ndarray, l2: float) -> np.ndarray:
        """Return scores (t, C) for features of other images."""
        W_DC = self.weights(l2)
        parts = [self._standardized(x_tD[i : i + _CHUNK]) @ W_DC for i in range(0, len(x_tD), _CHUNK)]
        return np.concatenate(parts)

    def left_out(self, l2: float) -> np.ndarray:
        """Return (n, C): what the solution without example i says of example i (standardized as with it)."""
        Q, inverse_r = self.vectors, self._inverse(l2)
        if _tall(self.Z_nD):  # I - H in place of l2 G: the factor cancels
            A_nD = self._rotated
            residuals_nC = self.Y_nC - A_nD @ (inverse_r[:, None] * (A_nD.T @ self.Y_nC))
            share_n = 1.0 - (A_nD**2) @ inverse_r
        else:
            residuals_nC = Q @ (inverse_r[:, None] * (Q.T @ self.Y_nC))
            share_n = (Q**2) @ inverse_r
        return self.Y_nC - residuals_nC / np.maximum(share_n, np.finfo(np.float64).tiny)[:, None]

    @cached_property
    def _rotated(self) -> np.ndarray:
        """Return the examples (n, D) in the directions of the eigenvectors of Z'Z, which are the same for every l2."""
        return self.Z_nD @ self.vectors

    def _standardized(self, x_tD: np.ndarray) -> np.ndarray:
        return _with_bias((np.asarray(x_tD, dtype=np.float64) - self.mean_D) / self.std_D)

    def _inverse(self, l2: float) -> np.ndarray:
        """Return 1 / (eigenvalue + l2); without a penalty it is 0 for directions that the data does not have."""
        if l2 < 0:
            raise ValueError(f"l2 must not be negative, got {l2}")
        shifted_r = self.eigenvalues_r + l2
        real_r = shifted_r > shifted_r.max() * np.finfo(np.float64).eps * len(shifted_r) if l2 == 0 else shifted_r > 0
        return np.where(real_r, 1.0 / np.where(real_r, shifted_r, 1.0), 0.0)


def sample(labels_n: np.ndarray, classes: int, seed: int, sub_seed: int = 0) -> list[np.ndarray]:
    """List for each class its examples in a random order; k shots are the first k, so larger sets contain smaller.

    The same draws as the reference makes for the same labels in the same order.
    """
    rng = np.random.default_rng(hash((seed, sub_seed)) % 2**31)
    return [rng.permutation(np.flatnonzero(labels_n == c)) for c in range(classes)]


@dataclass(frozen=True)
class FewShotResult:
    """Accuracies by data set, shots and seed."""

    protocol: Protocol
    seeds: int
    accuracies: dict[str, dict[int, list[float]]]
    l2: dict[str, dict[int, list[float]]]
    """The penalty each accuracy was reached with."""
    short: dict[str, dict[int, int]] = field(default_factory=dict)
    """Number of classes that have fewer examples than shots, where there are such."""

    def numbers(self) -> dict[str, float]:
        """Return the mean over seeds by `name/10shot`."""
        return {
            f"{name}/{shots}shot": float(np.mean(values))
            for name, by_shots in self.accuracies.items()
            for shots, values in by_shots.items()
        }

    def to_dict(self) -> dict[str, Any]:
        chosen = {
            "loo": "by leave-one-out on the training examples (one shot: on two), without the test set",
            "paper": "by test accuracy, as in the paper: optimistic",
        }[self.protocol]
        return {
            "protocol": self.protocol,
            "l2_chosen": chosen,
            "seeds": self.seeds,
            "numbers": self.numbers(),
            "accuracies": self.accuracies,
            "l2": self.l2,
            "short": self.short,
        }


MAX_SEEDS = 10_000


def few_shot(
    data: Mapping[str, tuple[Features, Features]],
    *,
    shots: Sequence[int] = SHOTS,
    seeds: int = 3,
    seed: int = 0,
    protocol: Protocol = "loo",
    l2_grid: Sequence[float] = L2_GRID,
) -> FewShotResult:
    """Measure accuracy on test features from k training features of each class; `data` maps names to (train, test)."""
    if not shots or min(shots) < 1 or not 1 <= seeds <= MAX_SEEDS:
        raise ValueError(
            f"shots and seeds must be at least 1, seeds at most {MAX_SEEDS:,}: got shots {list(shots)}, {seeds} seeds"
        )
    accuracies = {name: {k: [0.0] * seeds for k in shots} for name in data}
    chosen = {name: {k: [0.0] * seeds for k in shots} for name in data}
    on_test: dict[int, list[tuple[str, int, np.ndarray]]] = {k: [] for k in shots}
    for name, (train, test) in data.items():
        classes = _check(name, train, test)
        for sub_seed in range(seeds):
            order = sample(train.single_labels(), classes, seed, sub_seed)
            for k in shots:
                ridge = fit_shots(train, order, k)
                if protocol == "loo":
                    l2 = choose_by_leave_one_out(ridge if k > 1 else fit_shots(train, order, 2), l2_grid)
                    chosen[name][k][sub_seed] = l2
                    accuracies[name][k][sub_seed] = accuracy(ridge, test, l2)
                else:
                    row = np.array([accuracy(ridge, test, l2) for l2 in l2_grid])
                    on_test[k].append((name, sub_seed, row))
    for k in shots if protocol == "paper" else ():
        best = choose_by_test([row for _, _, row in on_test[k]])
        for name, sub_seed, row in on_test[k]:
            accuracies[name][k][sub_seed], chosen[name][k][sub_seed] = float(row[best]), l2_grid[best]
    return FewShotResult(protocol, seeds, accuracies, chosen, {name: _short(d[0], shots) for name, d in data.items()})


def accuracy(ridge: Ridge, test: Features, l2: float) -> float:
    return float((ridge.scores(test.vectors, l2).argmax(1) == test.single_labels()).mean())


def fit_shots(train: Features, order: Sequence[np.ndarray], shots: int) -> Ridge:
    """Set up the problem of the first `shots` examples of each class in this order."""
    picked = np.concatenate([indices[:shots] for indices in order])
    return Ridge.fit(train.vectors[picked], train.single_labels()[picked], len(train.classes))


def choose_by_leave_one_out(ridge: Ridge, grid: Sequence[float]) -> float:
    """Return the l2 of the best accuracy over left-out examples; among equals, that of the smallest squared error."""
    truth_n = ridge.Y_nC.argmax(1)

    def quality(l2: float) -> tuple[float, float]:
        said_nC = ridge.left_out(l2)
        return float((said_nC.argmax(1) == truth_n).mean()), -float(((said_nC - ridge.Y_nC) ** 2).mean())

    return max(grid, key=quality)


def choose_by_test(accuracies: Sequence[np.ndarray]) -> int:
    """Return the index of the l2 with the best mean rank: one for all data sets and seeds, as the paper's code does."""
    ranks = [np.argsort(np.argsort(row)) for row in accuracies]
    return int(np.argmax(np.mean(ranks, axis=0)))


def _check(name: str, train: Features, test: Features) -> int:
    if len(train.classes) < 2 or train.classes != test.classes:
        raise ValueError(f"{name}: training and test data must have the same classes, and at least two")
    missing = np.setdiff1d(np.arange(len(train.classes)), train.single_labels())
    if len(missing):
        raise ValueError(
            f"{name}: {len(missing)} of {len(train.classes)} classes have no training example "
            f"(the first is {train.classes[missing[0]]!r}); use more training examples"
        )
    return len(train.classes)


def _short(train: Features, shots: Sequence[int]) -> dict[int, int]:
    counts = np.bincount(train.single_labels(), minlength=len(train.classes))
    return {k: int((counts < k).sum()) for k in shots if (counts < k).any()}


def _with_bias(z: np.ndarray) -> np.ndarray:
    return np.concatenate([z, np.full((len(z), 1), BIAS)], axis=1)


def _tall(Z_nD: np.ndarray) -> bool:
    return Z_nD.shape[0] >= Z_nD.shape[1]
