"""`softmoe fewshot MODEL DATA...`: how well a few examples of each class tell the classes apart."""

from dataclasses import dataclass
from typing import Any

from softmoe.cli.parse import Printed, parse, percent_on_terminal
from softmoe.evaluate import FewShot


@dataclass(frozen=True)
class Arguments(Printed, FewShot):
    """Few-shot accuracy of a saved model's features, by ridge regression in closed form."""


def main(argv: list[str]) -> int:
    a = parse(Arguments, argv, "fewshot")
    report = a.run(percent_on_terminal("features"))
    a.show(report, table(report))
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
