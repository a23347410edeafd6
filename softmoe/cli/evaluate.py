"""`softmoe evaluate`, `predict` and `fewshot`: how good a saved model is, and what it says of images.

`softmoe inspect` and `doctor`: what its routers do, and what is wrong with it.
"""

import csv
import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from softmoe.cli.parse import Printed, parse, percent_on_terminal
from softmoe.evaluate import Evaluate, FewShot, Predict
from softmoe.inspection.api import Doctor, Inspect
from softmoe.paths import can_write, check_new, home_path, unused_path
from softmoe.storage.files import whole_file, write_bytes

if TYPE_CHECKING:
    from softmoe.evaluate import Prediction
    from softmoe.inspection.doctor import Verdict

SHOWN = 10  # lines of predictions, where all of them are in a file


@dataclass(frozen=True, kw_only=True)
class EvaluateArguments(Printed, Evaluate):
    """Accuracy, loss and calibration of a saved model, and a page with its confusions, classes and worst photos."""

    out: Path | None = None
    """A new file for the page (.html) or everything as JSON (.json). If not given, the page is evaluation.html in the
    run's folder, or MODEL_evaluation.html beside another saved model, with a number if there is one. There is none with
    --json, and none for a model that is not in a folder of yours (demo, user/name on the Hub)."""
    classes: bool = False
    """Print the table of classes."""


def evaluate_command(argv: list[str]) -> int:
    a = parse(EvaluateArguments, argv, "evaluate")
    report = a.run(percent_on_terminal("evaluating"))

    from softmoe.evaluate.mistakes import write_page

    worst = [{key: value for key, value in row.items() if key != "picture"} for row in report["worst"]]
    as_json = a.out is not None and a.out.suffix == ".json"
    text = evaluation_text(report, classes=a.classes)
    replace(a, out=a.out if as_json else None).show(report | {"worst": worst}, text)
    if not as_json and (a.out or not a.json):
        place = a.out or page_beside(str(a.model))
        written = place and write_page(report, place, f"{a.model} on {a.data}")
        if not a.json:
            print(f"{'page':<27}{written or 'none: --out FILE.html says where to write one'}")
    return 1 if report["unreadable"] else 0


def page_beside(model: str) -> Path | None:
    """Return a new file in the folder of the model's run, or beside the model; None if nothing can be written there."""
    from softmoe.convert.foreign import split_options

    path = home_path(split_options(model)[0])
    if not path.exists():
        return None
    if path.name in ("", ".."):
        path = path.resolve()
    run = next((folder for folder in (path, *path.parents[:2]) if (folder / "metrics.jsonl").is_file()), None)
    name = path.stem if path.is_file() else path.name
    place = run / "evaluation.html" if run else path.with_name(f"{name}_evaluation.html")
    return unused_path(place) if can_write(place.parent) else None


def evaluation_text(report: dict[str, Any], *, classes: bool) -> str:
    numbers = report["numbers"]
    first = "precision@1 (multi-label)" if report["multi_label"] else "top-1"
    rows = [
        ("images", f"{report['images']}"),
        (first, f"{numbers['top1']:.2%}"),
        *([("top-5", f"{numbers['top5']:.2%}")] if len(report["classes"]) > 5 else []),  # else always all
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


@dataclass(frozen=True, kw_only=True)
class PredictArguments(Predict):
    """The likeliest classes of images. Exit code 1 if some could not be read; they are named."""

    json: bool = False
    """Print as JSON."""
    csv: Path | None = None
    """Also write a table to this new file: a row for each image, with its classes and their probabilities."""
    features: Path | None = None
    """Also write the vectors before the head to this new .npy file: a row for each image, in the order printed."""


def predict_command(argv: list[str]) -> int:
    a = parse(PredictArguments, argv, "predict")
    check_new(a.csv, "--csv")
    check_new(a.features, "--features")
    predictions, unreadable = a.run(percent_on_terminal("predicting"))
    if a.json:
        bad = [{"image": image.name, "reason": image.reason} for image in unreadable]
        print(json.dumps({"predictions": [p.to_dict() for p in predictions], "unreadable": bad}, indent=2))
    else:
        shown = predictions if a.csv is None else predictions[:SHOWN]
        for prediction in shown:
            print(prediction_line(prediction))
        if len(shown) < len(predictions):
            print(f"... and {len(predictions) - len(shown):,} more in {a.csv}")
    for path, save in ((a.csv, save_table), (a.features, save_features)):
        if path is not None:
            save(path, predictions)
            if not a.json:
                print(path)
    for image in unreadable:
        print(f"softmoe: unreadable: {image.name}: {image.reason}", file=sys.stderr)
    return 1 if unreadable else 0


def prediction_line(prediction: "Prediction") -> str:
    classes = ", ".join(f"{name} {probability:.1%}" for name, probability in prediction.top)
    return f"{prediction.name}: {classes or f'{len(prediction.features)} features'}"


def save_features(path: Path, predictions: "list[Prediction]") -> None:
    if not predictions:
        raise ValueError(f"{path} was not written: none of the images could be read")
    import numpy as np

    with whole_file(path) as file:  # np.save would add .npy to another name
        np.save(file, np.stack([p.features for p in predictions]))


def save_table(path: Path, predictions: "list[Prediction]") -> None:
    places = range(1, 1 + max((len(p.top) for p in predictions), default=0))
    text = io.StringIO()
    rows = csv.writer(text)
    rows.writerow(["image", *(word for n in places for word in (f"class_{n}", f"probability_{n}"))])
    rows.writerows([p.name, *(cell for name, share in p.top for cell in (name, f"{share:.6f}"))] for p in predictions)
    write_bytes(path, text.getvalue().encode(errors="backslashreplace"))


@dataclass(frozen=True)
class FewShotArguments(Printed, FewShot):
    """Few-shot accuracy of a saved model's features, by ridge regression in closed form."""


def fewshot_command(argv: list[str]) -> int:
    return measure(FewShotArguments, argv, "fewshot", fewshot_text)


def measure(command: Any, argv: list[str], name: str, text: Callable[[dict[str, Any]], str]) -> int:
    """Run a command that measures the features of a model, and show its report."""
    a = parse(command, argv, name)
    report = a.run(percent_on_terminal("features"))
    a.show(report, text(report))
    return 0


def fewshot_text(report: dict[str, Any]) -> str:
    found = report["fewshot"]
    lines = []
    for name, by_shots in found["accuracies"].items():
        images = report["images"][name]
        lines.append(f"{name}: {images['train']} training and {images['test']} test images")
        for shots, values in by_shots.items():
            mean, spread = sum(values) / len(values), f" ({min(values):.2%} to {max(values):.2%})"
            short = found["short"].get(name, {}).get(shots, 0)
            note = f"   {short} classes have fewer images" if short else ""
            lines.append(f"  {shots:>3}-shot   {mean:7.2%}{spread if len(values) > 1 else ''}{note}")
        for kind in ("knn", "linear_probe"):
            if kind in report:
                lines.append(f"  {kind.replace('_', ' '):<12}{report[kind][name]['top1']:7.2%}   all training images")
    seeds = "1 seed" if found["seeds"] == 1 else f"mean of {found['seeds']} seeds"
    lines.append(f"{seeds}; penalty chosen {found['l2_chosen']} (--protocol {found['protocol']})")
    return "\n".join(lines)


def inspect_command(argv: list[str]) -> int:
    models, written = parse(Inspect, argv, "inspect").run(percent_on_terminal("inspecting"))

    from softmoe.inspection import plots
    from softmoe.inspection.page import layers_text, notes_of

    for model in models:
        print(f"{model.name}: {model.images:,} images\n{layers_text(model)}\n")
    print("\n".join(f"{columns}: {meaning}" for columns, meaning in notes_of(models)) + "\n")
    if not plots.available():
        print("softmoe: no figures were drawn, they need matplotlib: pip install 'softmoe-vit[plots]'", file=sys.stderr)
    for path in written:
        if path.suffix != ".svg":
            print(path)
    return 0


@dataclass(frozen=True, kw_only=True)
class DoctorArguments(Doctor):
    """Check a model or a run. Exit code 0 if nothing is wrong, 1 if something is."""

    json: bool = False
    """Print as JSON."""


def doctor_command(argv: list[str]) -> int:
    a = parse(DoctorArguments, argv, "doctor")
    verdicts = a.run()
    wrong = sum(v.wrong is True for v in verdicts)
    if a.json:
        print(
            json.dumps({"model": str(a.model), "wrong": wrong, "verdicts": [v.to_dict() for v in verdicts]}, indent=2)
        )
    else:
        print("\n".join(verdict_line(v) for v in verdicts))
        print(f"\n{a.model}: {verdict_summary(verdicts, wrong)}")
    return 1 if wrong else 0


def verdict_summary(verdicts: "list[Verdict]", wrong: int) -> str:
    """Say what was looked at, and what came of it."""
    known = [v.check for v in verdicts if v.wrong is not None]
    left = len(verdicts) - len(known)
    told = f"{wrong} of {len(known)} checks found something wrong" if wrong else "nothing is wrong"
    return f"{told} ({', '.join(dict.fromkeys(known))})" + (f"; {left} could not be judged" if left else "")


def verdict_line(v: "Verdict") -> str:
    mark = {True: "WRONG", False: "ok", None: "-"}[v.wrong]
    text = f"{mark:<6} {v.check}: {v.figure}" + (f" (limit: {v.limit})" if v.limit else "")
    return f"{text}\n       {v.advice}" if v.wrong else text
