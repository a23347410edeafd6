"""Counting of right answers, against plain loops."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from softmoe.data import Batch
from softmoe.evaluate.classify import class_count, classification, count
from softmoe.models import create_model
from softmoe.models.classification import BINS, Totals
from softmoe.moe.record import evaluating


def batch(images: torch.Tensor, labels: torch.Tensor) -> Batch:
    return Batch(images, labels, torch.arange(len(images)))


class Table(torch.nn.Module):
    """Gives back the logits it is fed as images."""

    def __init__(self, classes: int):
        super().__init__()
        self.head = torch.nn.Linear(1, classes)

    def forward(self, images):
        return images


def plain(logits: torch.Tensor, label_sets: list[set[int]], loss: str = "softmax") -> dict[str, float]:
    """The definition, one image at a time."""
    rows = [(row, labels) for row, labels in zip(logits.double().tolist(), label_sets, strict=True) if labels]
    top1 = top5 = total = 0.0
    seen, right_of = {}, {}
    bins: dict[int, list[tuple[float, bool]]] = {}
    for row, labels in rows:
        order = sorted(range(len(row)), key=lambda c: -row[c])
        exponents = [math.exp(v) for v in row]
        shares = [e / sum(exponents) for e in exponents]
        if loss == "softmax":
            total += -sum(math.log(shares[c]) for c in labels)
        else:
            shares = [1 / (1 + math.exp(-v)) for v in row]
            total += -sum(math.log(p if c in labels else 1 - p) for c, p in enumerate(shares))
        right = order[0] in labels
        top1 += right
        top5 += any(c in labels for c in order[:5])
        for c in labels:
            seen[c] = seen.get(c, 0) + 1
            right_of[c] = right_of.get(c, 0) + (order[0] == c)
        bins.setdefault(min(int(max(shares) * BINS), BINS - 1), []).append((max(shares), right))
    gap = sum(abs(sum(p for p, _ in group) - sum(r for _, r in group)) for group in bins.values())
    return {
        "top1": top1 / len(rows),
        "top5": top5 / len(rows),
        "loss": total / len(rows),
        "class_mean": sum(right_of[c] / seen[c] for c in seen) / len(seen),
        "calibration_error": gap / len(rows),
        "confidence": sum(p for group in bins.values() for p, _ in group) / len(rows),
    }


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
@pytest.mark.parametrize("classes", [2, 4, 9])
def test_numbers_against_loops(loss, classes):
    """Every number is its definition."""
    logits = torch.randn(37, classes, dtype=torch.float64) * 2
    labels = torch.randint(classes, (37,))
    found = classification(Table(classes), [batch(logits, labels)], loss=loss)
    expected = plain(logits, [{int(label)} for label in labels], loss)
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_several_labels(loss):
    """A prediction is right if it is one of the labels; images without any are left out and counted."""
    logits = torch.randn(50, 6, dtype=torch.float64)
    labels = (torch.rand(50, 6) < 0.25).float()
    labels[:3] = 0
    sets = [set(row.nonzero().flatten().tolist()) for row in labels]
    totals = count(Table(6), [batch(logits, labels)], loss=loss)
    assert totals.numbers() == pytest.approx(plain(logits, sets, loss), abs=1e-6)
    assert totals.unlabeled == sum(not s for s in sets)
    assert totals.images + totals.unlabeled == 50


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 3))
def test_any_batches_and_processes(sizes, world):
    """The same images in batches of any sizes, dealt to any number of processes, give the same sums."""
    rows = sum(sizes)
    if not rows:
        return
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, 7, generator=generator)
    labels = torch.randint(7, (rows,), generator=generator)
    whole = count(Table(7), [batch(logits, labels)])
    parts = [batch(a, b) for a, b in zip(logits.split(sizes), labels.split(sizes), strict=True)]
    shares = [count(Table(7), parts[rank::world]) for rank in range(world)]

    def flat(totals: Totals) -> torch.Tensor:
        return torch.cat([totals.sums, totals.by_class.flatten(), totals.by_bin.flatten()])

    together = shares[0]
    for share in shares[1:]:
        together.sums, together.by_class = together.sums + share.sums, together.by_class + share.by_class
        together.by_bin = together.by_bin + share.by_bin
    assert torch.allclose(flat(together), flat(whole), rtol=1e-12, atol=1e-12)
    assert together.numbers() == pytest.approx(whole.numbers(), rel=1e-9)


def test_tables():
    """Rows of classes and bins add up to the images."""
    logits, labels = torch.randn(60, 4), torch.randint(3, (60,))
    totals = count(Table(4), [batch(logits, labels)])
    rows = totals.class_table("abcd")
    assert [row["class"] for row in rows] == list("abcd")
    assert sum(row["images"] for row in rows) == sum(row["predicted"] for row in rows) == 60
    assert rows[3]["images"] == rows[3]["right"] == 0
    assert sum(row["right"] for row in rows) == round(totals.numbers()["top1"] * 60)
    bins = totals.calibration_table()
    assert sum(row["images"] for row in bins) == 60
    assert all(row["from"] <= row["confidence"] <= row["to"] for row in bins)


def test_a_sure_and_right_model_is_calibrated():
    """Confidence 1 and accuracy 1: no error. Confidence 1 and accuracy 0: an error of 1."""
    logits = torch.eye(3) * 100
    good = classification(Table(3), [batch(logits, torch.arange(3))])
    bad = classification(Table(3), [batch(logits, torch.tensor([1, 2, 0]))])
    assert good["calibration_error"] == pytest.approx(0, abs=1e-6)
    assert bad["calibration_error"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([0, 3]), "label 3 is outside the model's head, which has 3 classes"),
        (torch.tensor([-1, 0]), "label -1"),
        (torch.zeros(2, 4), "labels have 4 classes, but the model's head has 3"),
    ],
)
def test_wrong_labels(labels, message):
    """Labels outside the head are refused."""
    with pytest.raises(ValueError, match=message):
        classification(Table(3), [batch(torch.randn(2, 3), labels)])


def test_broken_models_and_empty_data():
    """Outputs that are not numbers, no images, and a model without a head are errors, not numbers."""
    with pytest.raises(ValueError, match="not finite"):
        classification(Table(2), [batch(torch.tensor([[0.0, math.nan]]), torch.tensor([0]))])
    with pytest.raises(ValueError, match="nothing to evaluate on"):
        classification(Table(2), [])
    with pytest.raises(ValueError, match="no classification head"):
        class_count(create_model("vit_ti16", num_classes=None, image_size=32, depth=1))


def test_evaluation_mode_and_back():
    """No gradient, no dropout inside; outside each module has the mode it had, also after an error."""
    model = create_model("vit_ti16", image_size=32, depth=1, num_classes=3, dropout=0.5).train()
    model.embed.eval()
    images = torch.randn(4, 3, 32, 32)
    with evaluating(model), torch.inference_mode():
        first, second = model(images), model(images)
    assert model.training
    assert not first.requires_grad
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError), evaluating(model):
        raise RuntimeError
    assert model.training
    assert model.encoder.training
    assert not model.embed.training


def test_unread_images_do_not_count():
    """An empty batch, as a rank may get at the end, changes nothing."""
    full = batch(torch.randn(5, 3), torch.randint(3, (5,)))
    empty = replace(full, images=full.images[:0], labels=full.labels[:0], indices=full.indices[:0])
    assert classification(Table(3), [empty, full, empty]) == classification(Table(3), [full])
