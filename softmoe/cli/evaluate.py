"""`softmoe evaluate MODEL DATA`: accuracy, loss, calibration, and a row for every class."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from softmoe.cli.cost import parse_size
from softmoe.cli.progress import percent_on_terminal


@dataclass(frozen=True)
class Arguments:
    """Accuracy, loss and calibration of a saved model."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder of a saved model or of a run, or a Hub id (user/name)."""
    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """Source of images: a folder with SPLIT/CLASS/IMAGE, or shapes, wds:PATTERN, hf:NAME, idx:PATH, digits."""
    split: str = "val"
    labels: Path | None = None
    """JSON of labels to use instead, several per image: a list by image number (ReaL's form) or an object by name."""
    examples: int | None = None
    """Evaluate on so many images only, chosen at random (always the same ones)."""
    image_size: str | None = None
    """Pixels, or HEIGHTxWIDTH; the size the model was saved with if not given."""
    loss: Literal["softmax", "sigmoid"] = "softmax"
    """The loss the model was trained with; also decides what confidence means."""
    batch_size: int = 128
    workers: int = 0
    """Processes that read images."""
    device: str = "auto"
    weights: Literal["float32", "float16", "bfloat16", "int8", "int8_dynamic", "mapped"] | None = None
    """Prepare the model for fast inference, with its experts stored so; mapped: for models larger than the memory."""
    agreement: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """With --weights: also run the model as saved, and say how often both put the same class first."""
    classes: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the table of classes."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print everything as JSON."""
    output: Path | None = None
    """Also write everything to this JSON file."""


def main(argv: list[str]) -> int:
    a = tyro.cli(Arguments, args=argv, prog="softmoe evaluate")
    size = None if a.image_size is None else parse_size(a.image_size)

    from softmoe.evaluate import evaluate

    report = evaluate(
        a.model,
        a.data,
        split=a.split,
        labels=a.labels,
        examples=a.examples,
        image_size=size,
        loss=a.loss,
        batch_size=a.batch_size,
        workers=a.workers,
        device=a.device,
        weights=a.weights,
        agreement=a.agreement,
        progress=percent_on_terminal("evaluating"),
    )
    text = json.dumps(report, indent=2)
    if a.output:
        a.output.write_text(text + "\n")
    print(text if a.json else table(report, classes=a.classes))
    return 1 if report["unreadable"] else 0


def table(report: dict[str, Any], *, classes: bool) -> str:
    numbers = report["numbers"]
    first = "precision@1 (multi-label)" if report["multi_label"] else "top-1"
    rows = [
        ("images", f"{report['images']}"),
        (first, f"{numbers['top1']:.2%}"),
        ("top-5", f"{numbers['top5']:.2%}"),
        ("mean over classes", f"{numbers['class_mean']:.2%}"),
        ("loss", f"{numbers['loss']:.4f}"),
        ("calibration error", f"{numbers['calibration_error']:.4f}"),
        ("mean confidence", f"{numbers['confidence']:.2%}"),
    ]
    if "agreement" in numbers:
        rows.append(("agrees with saved weights", f"{numbers['agreement']:.2%}"))
    if report["unlabeled"]:
        rows.append(("left out: no label", str(report["unlabeled"])))
    if report["classes_matched_by"] == "number":
        rows.append(("note", "classes were matched by their number, not by name"))
    lines = [f"{name:<27}{value}" for name, value in rows]
    if classes:
        width = max(len(row["class"]) for row in report["classes"])
        lines += ["", f"{'class':<{width}}  images  right  predicted  top-1"]
        for row in report["classes"]:
            share = f"{row['right'] / row['images']:.1%}" if row["images"] else "-"
            counts = f"{row['images']:>6}  {row['right']:>5}  {row['predicted']:>9}  {share:>5}"
            lines.append(f"{row['class']:<{width}}  {counts}")
    lines += [f"unreadable: {row['image']}: {row['reason']}" for row in report["unreadable"]]
    return "\n".join(lines)
