"""`softmoe fewshot MODEL DATA...`: how well a few examples of each class tell the classes apart."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from softmoe.cli.cost import parse_size
from softmoe.cli.progress import percent_on_terminal


@dataclass(frozen=True)
class Arguments:
    """Few-shot accuracy of a saved model's features, by ridge regression in closed form."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder of a saved model or of a run, or a Hub id (user/name)."""
    data: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """Sources of images, each with a training and a test split."""
    shots: tuple[int, ...] = (1, 5, 10, 25)
    """Training images of each class."""
    seeds: int = 3
    """Draws of training images; the mean is reported."""
    protocol: Literal["loo", "paper"] = "loo"
    """loo chooses the penalty without the test set; paper chooses it by test accuracy, as the paper does."""
    knn: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Also classify by nearest neighbors among all training images."""
    linear: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Also train a linear classifier on all training images."""
    train_split: str = "train"
    test_split: str = "val"
    train_examples: int | None = None
    """Take the shots from so many training images, chosen at random, instead of from all."""
    test_examples: int | None = None
    image_size: str | None = None
    """Pixels, or HEIGHTxWIDTH; the size the model was saved with if not given."""
    batch_size: int = 128
    workers: int = 0
    """Processes that read images."""
    device: str = "auto"
    no_cache: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Do not keep the features in $SOFTMOE_CACHE (or ~/.cache/softmoe)."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print everything as JSON."""
    output: Path | None = None
    """Also write everything to this JSON file."""


def main(argv: list[str]) -> int:
    a = tyro.cli(Arguments, args=argv, prog="softmoe fewshot")
    size = None if a.image_size is None else parse_size(a.image_size)

    from softmoe.evaluate.api import fewshot

    report = fewshot(
        a.model,
        a.data,
        shots=a.shots,
        seeds=a.seeds,
        protocol=a.protocol,
        knn=a.knn,
        linear=a.linear,
        train_split=a.train_split,
        test_split=a.test_split,
        train_examples=a.train_examples,
        test_examples=a.test_examples,
        image_size=size,
        batch_size=a.batch_size,
        workers=a.workers,
        device=a.device,
        cache=not a.no_cache,
        progress=percent_on_terminal("features"),
    )
    text = json.dumps(report, indent=2)
    if a.output:
        a.output.write_text(text + "\n")
    print(text if a.json else table(report))
    return 0


def table(report: dict[str, Any]) -> str:
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
