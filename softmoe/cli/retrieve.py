"""`softmoe retrieve MODEL DATA`: the right captions for images, and the right image for captions."""

from dataclasses import dataclass
from typing import Any

from softmoe.cli.parse import Printed, parse, percent_on_terminal
from softmoe.evaluate import Retrieve


@dataclass(frozen=True)
class Arguments(Printed, Retrieve):
    """Recall at 1, 5 and 10 of two towers, both ways, among all images and all captions of the data."""


def main(argv: list[str]) -> int:
    a = parse(Arguments, argv, "retrieve")
    report = a.run(percent_on_terminal("features"))
    a.show(report, text(report))
    return 0


def text(report: dict[str, Any]) -> str:
    lines = []
    for way in ("image_to_text", "text_to_image"):
        found = dict(report[way])
        median = found.pop("median_rank")
        numbers = "   ".join(f"{name} {value:6.2%}" for name, value in found.items())
        lines.append(f"{way.replace('_', ' '):<15}{numbers}   median rank {median:g}")
    left = f"; {report['left_out']} images were left out" if report["left_out"] else ""
    return "\n".join([*lines, f"{report['images']:,} images with {report['captions']:,} captions{left}"])
