"""`softmoe evaluate MODEL DATA`: accuracy, loss, calibration, and a row for every class."""

from dataclasses import dataclass
from typing import Any

from softmoe.cli.parse import Printed, parse, percent_on_terminal
from softmoe.evaluate import Evaluate


@dataclass(frozen=True, kw_only=True)
class Arguments(Printed, Evaluate):
    """Accuracy, loss and calibration of a saved model."""

    classes: bool = False
    """Print the table of classes."""


def main(argv: list[str]) -> int:
    a = parse(Arguments, argv, "evaluate")
    report = a.run(percent_on_terminal("evaluating"))
    a.show(report, table(report, classes=a.classes))
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
