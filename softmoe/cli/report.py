"""`softmoe report RUNS...`: one page for one or several runs."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from softmoe.cli.parse import parse


@dataclass(frozen=True)
class Arguments:
    """Write a page with the table, curves, differing settings and router health of runs."""

    runs: tuple[Path, ...]
    """Folders of runs."""
    _: KW_ONLY
    out: Path | None = None
    """Where the page goes; report.html in the first run's folder if not given."""
    title: str | None = None
    """Title of the page."""


def main(argv: list[str]) -> int:
    a = parse(Arguments, argv, "report")
    if not a.runs:
        raise ValueError("give the folders of runs: softmoe report RUNS...")

    from softmoe.report import load_run, summary_table, table_text, write_report

    records = [load_run(folder) for folder in a.runs]
    for record in records:
        if record.damaged:
            print(f"{record.folder}: {record.damaged} damaged lines of metrics.jsonl are left out")
    print(table_text(summary_table(records)))
    print(write_report(records, a.out or a.runs[0] / "report.html", title=a.title))
    return 0
