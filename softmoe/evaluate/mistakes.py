"""The mistakes of a classifier: which classes it takes for which, and the images of which it is most surely wrong.

Letters: B images, C classes.
"""

import heapq
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from softmoe.data import BrokenImage, Source
from softmoe.models.classification import Loss, probabilities
from softmoe.storage.files import write_text
from softmoe.storage.pages import render, thumbnail

WORST = 16  # images
SHOWN = 24  # classes of the picture
THUMBNAIL = 128
CELL, LETTER, LONGEST = 20, 6.6, 26


class Mistakes:
    """Counts (label, predicted) pairs, and keeps the wrong images with the highest confidence.

    Images with several labels are left out.
    """

    def __init__(self, loss: Loss) -> None:
        self.loss: Loss = loss
        self.pairs: Counter[tuple[int, int]] = Counter()
        self.worst: list[tuple[float, int, int, int]] = []

    def add(self, indices: Tensor, labels: Tensor, logits_BC: Tensor) -> None:
        if labels.ndim != 1:
            return
        best = probabilities(logits_BC, self.loss).max(1)
        rows = zip(indices.tolist(), labels.tolist(), best.indices.tolist(), best.values.tolist(), strict=True)
        for index, label, predicted, confidence in rows:
            if label < 0:
                continue
            self.pairs[label, predicted] += 1
            if label != predicted:
                keep = heapq.heappush if len(self.worst) < WORST else heapq.heappushpop
                keep(self.worst, (confidence, -index, label, predicted))

    def to_dict(self, names: Sequence[str], source: Source) -> dict[str, Any]:
        """Return the pairs, the most frequent first, and the worst images with a small picture of each."""
        pairs = sorted(self.pairs.items(), key=lambda item: (-item[1], item[0]))
        worst = [
            {
                **dict(zip(("image", "picture"), picture(source, -index), strict=True)),
                "class": names[label],
                "predicted": names[predicted],
                "confidence": confidence,
            }
            for confidence, index, label, predicted in sorted(self.worst, reverse=True)
        ]
        counted = [{"class": names[a], "predicted": names[b], "images": n} for (a, b), n in pairs]
        return {"confusions": counted, "worst": worst}


def picture(source: Source, index: int) -> tuple[str, str]:
    """Return the name of an image, and a small JPEG of it as a data address (empty if the file went away)."""
    try:
        example = source.read(index, THUMBNAIL)
    except BrokenImage as error:
        return str(error), ""
    return example.name or f"image {index}", thumbnail(example.image, THUMBNAIL)


def mistakes_section(report: dict[str, Any]) -> str:
    """Return HTML for a page: the picture of confusions, the table of classes, the worst images. Names are escaped."""
    rows = sorted(report["classes"], key=lambda row: row["right"] / row["images"] if row["images"] else 2.0)
    wrong = [row for row in report.get("confusions", []) if row["class"] != row["predicted"]]
    return render(
        "softmoe.evaluate",
        "mistakes.html",
        picture=confusion_picture(report),
        shown=min(SHOWN, len(rows)),
        classes=rows,
        wrong=wrong[:10],
        worst=report.get("worst", []),
    )


def write_page(report: dict[str, Any], path: Path, title: str) -> Path:
    """Write one file that opens from disk: the numbers, the confusions, the classes and the worst images."""
    section = mistakes_section(report)
    return write_text(path, render("softmoe.evaluate", "evaluation.html", title=title, report=report, section=section))


def confusion_picture(report: dict[str, Any]) -> str:
    """Return an SVG with a row for each class and a column for each prediction.

    Of many classes those that are most often mistaken are shown.
    """
    counts = {(row["class"], row["predicted"]): row["images"] for row in report.get("confusions", [])}
    if not counts:
        return ""
    missed: Counter[str] = Counter()
    for (label, predicted), images in counts.items():
        if label != predicted:
            missed[label] += images
            missed[predicted] += images
    names = [row["class"] for row in report["classes"]]
    chosen = set(sorted(names, key=lambda name: -missed[name])[:SHOWN])
    shown = [name for name in names if name in chosen]
    total = {row["class"]: row["images"] for row in report["classes"]}
    margin = 12 + LETTER * max(len(_short(name)) for name in shown)
    cells = [
        {
            "x": margin + CELL * column,
            "y": margin + CELL * row,
            "share": images / max(1, total[label]),
            "right": label == predicted,
            "images": images,
            "title": f"{label} taken for {predicted}: {images} of {total[label]}",
        }
        for row, label in enumerate(shown)
        for column, predicted in enumerate(shown)
        if (images := counts.get((label, predicted), 0))
    ]
    labels = [{"at": margin + CELL * (i + 0.5), "name": _short(name)} for i, name in enumerate(shown)]
    sizes = {"margin": margin, "cell": CELL, "side": margin + CELL * len(shown) + 2}
    return render("softmoe.evaluate", "confusions.svg", cells=cells, labels=labels, **sizes)


def _short(name: str) -> str:
    return name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"
