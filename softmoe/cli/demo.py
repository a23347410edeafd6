"""`softmoe demo`: the small model that comes with the package, before anything is trained."""

from dataclasses import dataclass
from pathlib import Path

from softmoe.cli.parse import parse


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Show a small trained Soft MoE that comes with the package: what it predicts, and a page of what is inside it."""

    out: Path = Path("softmoe_demo")
    """Folder for the pictures and the page."""
    pictures: int = 8
    """Pictures to predict, and to show on the page."""


def main(argv: list[str]) -> int:
    a = parse(Arguments, argv, "demo")

    from softmoe.studies.demo import run_demo

    shown, page = run_demo(a.out, a.pictures)
    right = 0
    for picture in shown:
        right += picture.shows == picture.taken_for
        answer = "right" if picture.shows == picture.taken_for else f"shows: {picture.shows}"
        print(f"{picture.path}: {picture.taken_for} {picture.probability:.0%} ({answer})")
    print(f"{right} of {len(shown)} right, of 288 classes, on pictures it was not trained on\n")
    print(f"what the slots look at, to open in a browser:\n  {page.resolve()}\n")
    print("the model is called `demo` wherever a model is asked for:")
    print(f"  softmoe predict demo {shown[0].path}")
    print('  softmoe fewshot demo "shapes?size=48&classes=downstream"')
    print("  softmoe finetune demo PHOTOS --image-size 96")
    return 0
