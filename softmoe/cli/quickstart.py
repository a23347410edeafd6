"""`softmoe demo` and `softmoe quickstart`: a trained model to look at, and a first one to train."""

from dataclasses import dataclass
from pathlib import Path

from softmoe.cli.parse import parse


@dataclass(frozen=True, kw_only=True)
class DemoArguments:
    """Show a small trained Soft MoE that comes with the package: what it predicts, and a page of what is inside it."""

    out: Path = Path("softmoe_demo")
    """Folder for the pictures and the page."""
    pictures: int = 8
    """Pictures to predict, and to show on the page."""


def demo_command(argv: list[str]) -> int:
    a = parse(DemoArguments, argv, "demo")

    from softmoe.studies.quickstart import run_demo

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


@dataclass(frozen=True, kw_only=True)
class QuickstartArguments:
    """Train a small Soft MoE, one expert with the same slots and a dense twin on drawn characters, and compare them."""

    runs: Path = Path("runs")
    """Folder for the runs. A quickstart that was stopped goes on from there."""
    seed: int = 0
    """The seed of weights and data."""
    tiny: bool = False
    """Two steps each, to see that everything works."""
    jobs: int | None = None
    """Models that train at the same time, a process of one thread each; one a core if not given."""


def quickstart_command(argv: list[str]) -> int:
    a = parse(QuickstartArguments, argv, "quickstart")
    if a.jobs is not None and a.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {a.jobs}")

    from softmoe.report import summary_table, table_text
    from softmoe.studies.quickstart import run_quickstart

    done = run_quickstart(a.runs, seed=a.seed, tiny=a.tiny, jobs=a.jobs)
    if not done.records:
        print("stopped; `softmoe quickstart` goes on from here")
        return 130
    print()
    print(table_text(summary_table(done.records)))
    print()
    print("\n".join(done.findings))
    print(f"\ncurves  {done.curves}\ngains   {done.gains}\ninside  {done.inside}\nreport  {done.report}")
    return 0
