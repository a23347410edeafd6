"""`softmoe quickstart`: train a small Soft MoE, its controls and its dense twin, and compare them."""

from pathlib import Path

import tyro


def run(runs: Path = Path("runs"), seed: int = 0, tiny: bool = False, jobs: int | None = None) -> int:
    """Train a small Soft MoE, one expert with the same slots and a dense twin on drawn characters, and compare them.

    Args:
        runs: Folder for the runs. A quickstart that was stopped goes on from there.
        seed: Of weights and data.
        tiny: Two steps each, to see that everything works.
        jobs: Models that train at the same time, a process of one thread each. None is one a core.
    """
    from softmoe.report import summary_table, table_text
    from softmoe.studies.quickstart import run_quickstart

    if jobs is not None and jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {jobs}")
    done = run_quickstart(runs, seed=seed, tiny=tiny, jobs=jobs)
    if not done.records:
        print("stopped; `softmoe quickstart` goes on from here")
        return 130
    print()
    print(table_text(summary_table(done.records)))
    print()
    print("\n".join(done.findings))
    print(f"\ncurves  {done.curves}\ngains   {done.gains}\ninside  {done.inside}\nreport  {done.report}")
    return 0


def main(argv: list[str]) -> int:
    return tyro.cli(run, prog="softmoe quickstart", args=argv)
