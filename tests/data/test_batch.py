"""Mixup: rolled neighbors, sorted Dirichlet weights. Cutmix: pasted rectangles."""

import numpy as np
import pytest
import torch

from softmoe.data import Transform, TransformConfig, open_source
from softmoe.data.augment import cutmix, draw_rectangle, mixup, mixup_weights
from softmoe.data.batch import TrainBatches
from softmoe.data.feed import finish


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


def test_cutmix():
    """Each pixel comes from the image or from the one that follows, the targets tell in which shares, and over many
    draws the pasted share varies."""
    images = torch.arange(4.0).reshape(4, 1, 1, 1).expand(4, 3, 16, 20).contiguous()
    targets, rng, shares = torch.eye(4), np.random.default_rng(0), []
    for _ in range(20):
        mixed, labels = cutmix(images, targets, draw_rectangle((16, 20), 1.0, rng))
        for row in range(4):
            other = (row + 1) % 4
            pasted = (mixed[row] == other).float().mean()
            assert ((mixed[row] == row) | (mixed[row] == other)).all()
            torch.testing.assert_close(labels[row, other], pasted)
            torch.testing.assert_close(labels[row, row], 1 - pasted)
        shares.append(float(labels[0, 1]))
    assert len(set(shares)) > 10
    assert 0.0 < min(shares) < 0.3 < max(shares) <= 1.0


def test_cutmix_in_a_stream():
    """Batches are a function of the step alone; with mixup beside it some batches get the one and some the other."""
    source = open_source("shapes?size=16&length=64", "train")
    both = Transform(TransformConfig(image_size=16, crop="resize", flip=False, mixup=0.2, cutmix=1.0), train=True)
    plain = Transform(TransformConfig(image_size=16, crop="resize", flip=False), train=True)
    kinds = set()
    for step in range(12):
        one, again = (TrainBatches(source, both, 8, 0, 1, 0)[step] for _ in range(2))
        assert torch.equal(one.images, again.images)
        raw = finish(TrainBatches(source, both, 8, 0, 1, 0, raw=True)[step], len(source.classes))
        torch.testing.assert_close(raw.images, one.images)
        torch.testing.assert_close(raw.labels, one.labels)
        torch.testing.assert_close(one.labels.sum(1), torch.ones(8))
        pixels = TrainBatches(source, plain, 8, 0, 1, 0)[step].images
        kinds.add(bool(((one.images == pixels) | (one.images == pixels.roll(-1, 0))).all()))
    assert kinds == {True, False}
