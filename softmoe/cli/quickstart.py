"""`softmoe quickstart`: train a small Soft MoE and its dense twin, and compare them."""

from pathlib import Path

import tyro


def run(runs: Path = Path("runs"), seed: int = 0, tiny: bool = False) -> int:
    """Train a small Soft MoE and its dense twin on generated images and compare them, in a few minutes.

    Args:
        runs: Folder for the two runs. A quickstart that was stopped goes on from there.
        seed: Of weights and data.
        tiny: Two steps each, to see that everything works.
    """
    from softmoe.report import summary_table, table_text
    from softmoe.studies.quickstart import run_quickstart

    done = run_quickstart(runs, seed=seed, tiny=tiny)
    if not done.records:
        print("stopped; `softmoe quickstart` goes on from here")
        return 130
    print()
    print(table_text(summary_table(done.records)))
    print(f"\ncurves  {done.curves}\ninside  {done.inside}\nreport  {done.report}")
    return 0


def main(argv: list[str]) -> int:
    return tyro.cli(run, prog="softmoe quickstart", args=argv)
