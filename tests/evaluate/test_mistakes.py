"""What a classifier gets wrong: pairs, the worst images, the picture and the page."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from softmoe.data import Example
from softmoe.evaluate.mistakes import SHOWN, WORST, Mistakes, confusion_picture, mistakes_section, write_page

NAMES = ("ant", "bee <b>", "cat")


class Source:
    """Gray images, called by their number."""

    def read(self, index: int, min_side: int | None = None) -> Example:
        return Example(np.full((8, 8, 3), index, np.uint8), (0,), name=f"{index}.jpg")


def logits(predicted: list[int], confidence: list[float]) -> torch.Tensor:
    """Three classes, the predicted one with this probability."""
    rows = [[(1 - c) / 2] * 3 for c in confidence]
    for row, p, c in zip(rows, predicted, confidence, strict=True):
        row[p] = c
    return torch.tensor(rows).log()


def report() -> dict:
    mistakes = Mistakes("softmax")
    mistakes.add(torch.arange(5), torch.tensor([0, 0, 1, 2, -1]), logits([0, 1, 1, 0, 0], [0.9, 0.6, 0.8, 0.95, 0.9]))
    classes = [
        {"class": n, "images": i, "right": r, "predicted": p}
        for n, i, r, p in zip(NAMES, (2, 1, 1), (1, 1, 0), (2, 2, 0), strict=True)
    ]
    numbers = {"top1": 0.5, "top5": 1.0, "class_mean": 0.5, "loss": 1.25, "calibration_error": 0.1, "confidence": 0.8}
    return {"model": "m", "images": 4, "numbers": numbers, "classes": classes, **mistakes.to_dict(NAMES, Source())}  # pyright: ignore[reportArgumentType]


def test_pairs_and_the_worst():
    """Each labeled image is counted once; the wrong ones are listed with their confidence, the surest first."""
    found = report()
    assert {(row["class"], row["predicted"]): row["images"] for row in found["confusions"]} == {
        ("ant", "ant"): 1,
        ("ant", "bee <b>"): 1,
        ("bee <b>", "bee <b>"): 1,
        ("cat", "ant"): 1,
    }
    assert [(row["image"], row["class"], row["predicted"]) for row in found["worst"]] == [
        ("3.jpg", "cat", "ant"),
        ("1.jpg", "ant", "bee <b>"),
    ]
    assert found["worst"][0]["confidence"] == pytest.approx(0.95)
    assert all(row["picture"].startswith("data:image/jpeg;base64,") for row in found["worst"])
    json.dumps(found)


def test_only_the_worst_are_kept():
    """Of many mistakes those with the highest confidence stay, and several labels an image have no place in a table."""
    mistakes, many = Mistakes("softmax"), 3 * WORST
    mistakes.add(torch.arange(many), torch.ones(many).long(), logits([0] * many, np.linspace(0.5, 0.99, many).tolist()))
    assert sorted(-index for _, index, _, _ in mistakes.worst) == list(range(many - WORST, many))
    mistakes.add(torch.arange(2), torch.ones(2, 3), logits([0, 0], [0.9, 0.9]))
    assert mistakes.pairs.total() == many


def test_the_picture_has_a_cell_for_each_pair():
    """Four pairs, four cells, of which two are right; every class has a row and a column."""
    svg = confusion_picture(report())
    assert svg.count("<rect") == 4
    assert svg.count('fill="#0b6e99"') == 2
    for name in ("ant", "bee &lt;b&gt;", "cat"):
        assert len(re.findall(f"<text[^>]*>{name}</text>", svg)) == 2


def test_numbers_can_be_read_on_deep_cells():
    """White on a cell that is deeper than half, the text's own color on the others."""
    found = re.findall(r'fill-opacity="([\d.]+)"/><text[^>]*fill="([^"]+)"', confusion_picture(report()))
    assert len(found) == 4
    assert {color for _, color in found} == {"#fff", "currentColor"}
    assert all((color == "#fff") == (float(depth) > 0.56) for depth, color in found)


def test_of_many_classes_the_most_mistaken_are_drawn():
    """A thousand classes would be a gray square: the picture has those that are mistaken most."""
    names = [f"c{i}" for i in range(100)]
    pairs = [{"class": n, "predicted": names[99 - i], "images": 1 + (i in (7, 70))} for i, n in enumerate(names)]
    classes = [{"class": n, "images": 2, "right": 0, "predicted": 1} for n in names]
    svg = confusion_picture({"classes": classes, "confusions": pairs})
    drawn = set(re.findall(r">(c\d+)<", svg))
    assert len(drawn) == SHOWN
    assert {"c7", "c92", "c70", "c29"} <= drawn


def test_the_page(tmp_path: Path):
    """One file with picture, table and photos; names are escaped; the weakest class comes first."""
    text = write_page(report(), tmp_path / "deep" / "page.html", "a title").read_text()
    assert "<b>" not in text
    section = mistakes_section(report())
    assert re.findall(r"<tr><td>(.*?)</td>", section) == ["cat", "ant", "bee &lt;b&gt;"]
    assert text.count("<img") == 2
    assert "<tr><td>loss</td><td>1.2500</td></tr>" in text
    assert "<tr><td>mean confidence</td><td>80.00 %</td></tr>" in text
