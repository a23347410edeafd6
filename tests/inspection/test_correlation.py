"""Inner products of slot parameters against plain loops."""

import numpy as np
import pytest
import torch

from softmoe.inspection import correlation_summary, slot_correlation, statistics
from softmoe.moe import SoftRouter, TokensChoiceRouter, UniformRouter


def vectors(router):
    """Slot vectors in the order of their experts, as plain lists."""
    return [router.phi[:, n, p].tolist() for n in range(router.num_experts) for p in range(router.slots_per_expert)]


def cosine(a, b):
    return np.dot(a, b) / (np.linalg.norm(a) * np.linalg.norm(b))


@pytest.mark.parametrize("block", [1, 4, 1000])
def test_summary(monkeypatch, block):
    """Means within and between experts, in blocks of any size."""
    monkeypatch.setattr(statistics, "BLOCK", block)
    router = SoftRouter(5, 3, 2)
    slots = vectors(router)
    matrix = np.array([[cosine(a, b) for b in slots] for a in slots])
    assert slot_correlation(router).numpy() == pytest.approx(matrix)
    assert slot_correlation(router, first=3).numpy() == pytest.approx(matrix[:3, :3])
    own = [matrix[i, j] for i in range(6) for j in range(6) if i // 2 == j // 2 and i != j]
    other = [matrix[i, j] for i in range(6) for j in range(6) if i // 2 != j // 2]
    found = correlation_summary(router)
    assert found["within_expert"] == pytest.approx(np.mean(own))
    assert found["between_experts"] == pytest.approx(np.mean(other))
    assert found["largest_between"] == pytest.approx(max(other))
    assert found["duplicates"] == 0
    assert found["scale"] == 1


def test_duplicates_and_edges():
    """A slot copied into another expert makes two doubles; one expert, one slot and zeros are fine."""
    router = SoftRouter(5, 4, 1)
    with torch.no_grad():
        router.phi[:, 3] = 2 * router.phi[:, 0]
    assert correlation_summary(router)["duplicates"] == 0.5
    one = correlation_summary(SoftRouter(5, 1, 1, normalize=False))
    assert one == {
        "within_expert": None,
        "between_experts": None,
        "largest_between": None,
        "duplicates": 0,
        "scale": None,
    }
    with torch.no_grad():
        router.phi.zero_()
    assert correlation_summary(router)["between_experts"] == 0
    assert correlation_summary(TokensChoiceRouter(5, 2)) is None
    assert correlation_summary(UniformRouter(5, 2)) is None
