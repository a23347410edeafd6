"""`softmoe evaluate MODEL DATA`: accuracy, loss, calibration, confusions, a row for every class, the worst photos."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from softmoe.cli.parse import Printed, parse, percent_on_terminal, unused
from softmoe.evaluate import Evaluate


@dataclass(frozen=True, kw_only=True)
class Arguments(Printed, Evaluate):
    """Accuracy, loss and calibration of a saved model, and a page with its confusions, classes and worst photos."""

    out: Path | None = None
    """Where the page (.html) or everything as JSON (.json) goes; evaluation.html in the run's folder, or here, if not
    given (with a number if there is one), and nowhere with --json."""
    classes: bool = False
    """Print the table of classes."""


def main(argv: list[str]) -> int:
    a = parse(Arguments, argv, "evaluate")
    report = a.run(percent_on_terminal("evaluating"))

    from softmoe.evaluate.mistakes import write_page

    told = table(report, classes=a.classes)
    if not a.json if a.out is None else a.out.suffix != ".json":
        run = Path(a.model)
        place = a.out or unused((run if (run / "metrics.jsonl").is_file() else Path()) / "evaluation.html")
        told += f"\n{'page':<27}{write_page(report, place, f'{a.model} on {a.data}')}"
        a = replace(a, out=None)
    report["worst"] = [{key: value for key, value in row.items() if key != "picture"} for row in report["worst"]]
    a.show(report, told)
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
    wrong = [row for row in report["confusions"] if row["class"] != row["predicted"]]
    if wrong:
        told = "; ".join(f"{row['class']} for {row['predicted']} ({row['images']})" for row in wrong[:3])
        lines.append(f"{'most often taken':<27}{told}")
    if classes:
        width = max(len(row["class"]) for row in report["classes"])
        lines += ["", f"{'class':<{width}}  images  right  predicted  top-1"]
        for row in report["classes"]:
            share = f"{row['right'] / row['images']:.1%}" if row["images"] else "-"
            counts = f"{row['images']:>6}  {row['right']:>5}  {row['predicted']:>9}  {share:>5}"
            lines.append(f"{row['class']:<{width}}  {counts}")
    lines += [f"unreadable: {row['image']}: {row['reason']}" for row in report["unreadable"]]
    return "\n".join(lines)
