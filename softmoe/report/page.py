"""One self-contained HTML page for one or several runs."""

from importlib.resources import files
from pathlib import Path

import jinja2

from softmoe import __version__
from softmoe.report.curves import as_svg, comparison, router_health
from softmoe.report.extras import fewshot_table, inspection_figures
from softmoe.report.runs import RunRecord
from softmoe.report.summary import differences, summary_table


def write_report(runs: list[RunRecord], path: Path, *, title: str | None = None, lead: tuple[str, ...] = ()) -> Path:
    """Table, few-shot, curves, settings, router health, inspection. Names come from files: everything is escaped."""
    page = jinja2.Environment(autoescape=True).from_string(files("softmoe.report").joinpath("page.html").read_text())
    figures = [(run.name, router_health(run)) for run in runs]
    text = page.render(
        title=title or "Runs: " + ", ".join(run.name for run in runs),
        lead=lead,
        names=[run.name for run in runs],
        summary=summary_table(runs),
        curves=as_svg(comparison(runs)),
        differences=differences(runs) if len(runs) > 1 else [],
        health=[(name, as_svg(figure)) for name, figure in figures if figure is not None],
        fewshot=fewshot_table(runs),
        inside=[(run.name, figures) for run in runs if (figures := inspection_figures(run))],
        folders=[(run.name, str(run.folder)) for run in runs],
        version=__version__,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path
