"""`softmoe zeroshot MODEL DATA`: classes told apart by their names alone."""

from dataclasses import dataclass
from typing import Any

from softmoe.cli.parse import Printed, parse, percent_on_terminal
from softmoe.evaluate import ZeroShot


@dataclass(frozen=True)
class Arguments(Printed, ZeroShot):
    """Accuracy of two towers that know the classes by name only."""


def main(argv: list[str]) -> int:
    a = parse(Arguments, argv, "zeroshot")
    report = a.run(percent_on_terminal("features"))
    a.show(report, text(report))
    return 0


def text(report: dict[str, Any]) -> str:
    numbers = "   ".join(f"{name} {value:.2%}" for name, value in report["numbers"].items())
    counts = f"{report['images']:,} images, {len(report['classes'])} classes, {len(report['templates'])} templates"
    return f"{numbers}   (chance {report['chance']:.2%})\n{counts}"
