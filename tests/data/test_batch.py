"""Mixup: rolled neighbors, sorted Dirichlet weights."""

import numpy as np
import pytest
import torch

from softmoe.data.batch import mixup, mixup_weights


def test_golden():
    """[1..6] with weights (.6, .4), the value of the reference."""
    x = torch.arange(1.0, 7.0)
    images, targets = mixup(x, x[:, None], torch.tensor([0.6, 0.4]))
    expected = torch.tensor([1.4, 2.4, 3.4, 4.4, 5.4, 4.0])
    torch.testing.assert_close(images, expected)
    torch.testing.assert_close(targets[:, 0], expected)


def test_weights_of_each_example():
    """(B, size) weights act row by row, as a plain loop does."""
    torch.manual_seed(0)
    images, targets = torch.randn(4, 3, 2, 2), torch.eye(4)
    weights = torch.rand(4, 3).softmax(1)
    mixed, labels = mixup(images, targets, weights)
    for b in range(4):
        torch.testing.assert_close(mixed[b], sum(weights[b, i] * images[(b + i) % 4] for i in range(3)))
        torch.testing.assert_close(labels[b], sum(weights[b, i] * targets[(b + i) % 4] for i in range(3)))


def test_weights():
    """Largest first, sum one, and the mean of the largest is that of a Dirichlet draw."""
    rng = np.random.default_rng(0)
    draws = np.stack([mixup_weights(1.0, rng) for _ in range(4000)])
    assert (draws[:, 0] >= draws[:, 1]).all()
    np.testing.assert_allclose(draws.sum(1), 1, rtol=1e-6)
    assert abs(draws[:, 0].mean() - 0.75) < 0.01  # the larger of two uniform parts
    assert mixup_weights(0.3, rng, size=3).shape == (3,)


@pytest.mark.parametrize(
    ("targets", "weights", "words"),
    [
        (torch.zeros(4, dtype=torch.int64), torch.ones(2), "float target"),
        (torch.zeros(3, 2), torch.ones(2), "float target"),
        (torch.zeros(4, 2), torch.ones(3, 2), r"\(batch, size\)"),
        (torch.zeros(4, 2), torch.ones(1, 1, 2), r"\(batch, size\)"),
    ],
)
def test_mistakes(targets, weights, words):
    """Shapes that do not fit are named."""
    with pytest.raises(ValueError, match=words):
        mixup(torch.zeros(4, 3, 2, 2), targets, weights)
