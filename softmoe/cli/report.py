"""`softmoe report RUNS...`: one page for one or several runs."""

from pathlib import Path
from typing import Annotated

import tyro


def run(
    runs: Annotated[list[Path], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    output: Path | None = None,
    title: str | None = None,
) -> None:
    """Write a page with the table, curves, differing settings and router health of runs.

    Args:
        runs: Folders of runs.
        output: Where the page goes; report.html in the first run's folder if not given.
        title: Title of the page.
    """
    from softmoe.report import load_run, summary_table, write_report
    from softmoe.report.summary import as_text

    records = [load_run(folder) for folder in runs]
    print(as_text(summary_table(records)))
    print(write_report(records, output or runs[0] / "report.html", title=title))


def main(argv: list[str]) -> int:
    tyro.cli(run, prog="softmoe report", args=argv)
    return 0
