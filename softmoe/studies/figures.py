"""The parts of which the studies' figures are made: the paper's form, ours beside it. Needs matplotlib."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from softmoe.inspection.plots import finish, legend, panels
from softmoe.studies.results import NAMES, QUALITY, Interval, Table

COLORS = {
    "soft": "#3b6fb6",
    "dense": "#c8403a",
    "tokens_choice": "#3f9455",
    "experts_choice": "#e0862e",
    "one": "#7f7f7f",
    "uniform_soft": "#6a4c93",
    "identity": "#8c6d31",
    "merged": "#d98a86",
}
"""As in the paper: Soft MoE blue, dense red, Tokens Choice green, Experts Choice orange; then the controls."""
ROUTING = {"Soft MoE": "soft", "Dense": "dense", "Tokens Choice": "tokens_choice", "Experts Choice": "experts_choice"}
"""The paper's words in its tables."""
PAPER_QUALITY = {"top1": "JFT precision at 1 (%)", "10shot": "ImageNet 10-shot (%)"}


def bars(axis: Any, found: Sequence[tuple[str, Interval]], color: str) -> None:
    """Draw named numbers as dots with intervals, the first on top."""
    places = np.arange(len(found))[::-1]
    errors = [i.half if np.isfinite(i.half) else 0.0 for _, i in found]
    axis.errorbar([i.mean for _, i in found], places, xerr=errors, fmt="o", color=color, capsize=3, ms=6)
    axis.set_yticks(places, [name for name, _ in found])
    axis.set_ylim(-0.6, len(found))
    for (_, i), place in zip(found, places, strict=True):
        axis.annotate(f"{i.mean:.1f}", (i.mean, place), xytext=(0, 6), textcoords="offset points", ha="center", size=8)
    axis.margins(x=0.15)


def curve(axis: Any, found: Sequence[tuple[float, Interval]], **style: Any) -> None:
    """Draw numbers with their intervals over x; one seed has no interval."""
    halves = [i.half if np.isfinite(i.half) else 0.0 for _, i in found]
    style = {"marker": "o", "capsize": 3} | style
    axis.errorbar([x for x, _ in found], [i.mean for _, i in found], yerr=halves, **style)


def waterfall(axis: Any, names: Sequence[str], path: Sequence[Table], number: str) -> None:
    """Draw how a number gets from the first table of a path to the last.

    There is a bar for each end, and between them a floating bar for every step, green where it adds and red where it
    takes, with the interval of the difference seed by seed. `names` are those of the first end, the steps and the last
    end.
    """
    means = [table.mean(number) for table in path]
    if None in means:
        axis.text(0.5, 0.5, "not run", ha="center", transform=axis.transAxes, color="#888888")
        return
    levels = [mean for mean in means if mean is not None]
    places = np.arange(len(names))[::-1]
    axis.barh([places[0], places[-1]], [levels[0], levels[-1]], color=["#c8403a", "#3b6fb6"])
    for place, level in ((places[0], levels[0]), (places[-1], levels[-1])):
        axis.annotate(f"{level:.1f}", (level, place), xytext=(4, 0), textcoords="offset points", va="center", size=8)
    farthest = max(levels)
    steps = zip(places[1:-1], path, path[1:], levels, levels[1:], strict=False)
    for place, before, after, start, end in steps:
        axis.barh(place, end - start, left=start, color="#3f9455" if end >= start else "#d98a86")
        axis.plot([start, start], [place - 0.4, place + 1.4], color="#888888", lw=0.8)
        found = after.minus(before, number)
        reach = max(start, end)
        if found is not None and found.count > 1:
            axis.errorbar(end, place, xerr=found.half, color="#333333", capsize=3, lw=1)
            reach = max(reach, end + found.half)
        farthest = max(farthest, reach)
        axis.annotate(
            f"{end - start:+.1f}", (reach, place), xytext=(4, 0), textcoords="offset points", va="center", size=8
        )
    axis.set_yticks(places, names)
    axis.set_ylim(-0.6, len(names) - 0.1)
    axis.set_xlim(0, 1.15 * (farthest or 1.0))  # the numbers behind the bars have room


def line(axis: Any, table: Table, x: str, number: str, **style: Any) -> None:
    """Draw means over seeds with intervals, against a label."""
    intervals = ((value, table.where(**{x: value}).interval(number)) for value in sorted(table.distinct(x)))
    if found := [(value, i) for value, i in intervals if i is not None]:
        curve(axis, found, ms=4, **style)


def powers(axis: Any, values: Sequence[float]) -> None:
    """Make the x axis logarithmic, with these ticks."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(values, [f"{value:g}" for value in values])
    axis.minorticks_off()


def heat(
    axis: Any,
    grid: Mapping[tuple[Any, Any], float | None],
    limits: tuple[float, float],
    x_label: str,
    y_label: str,
    form: str,
) -> None:
    """Draw a map of (column, row) -> value, colored between the limits; what was not run is left white."""
    if not grid:
        axis.text(0.5, 0.5, "not run", ha="center", transform=axis.transAxes, color="#888888")
        axis.set(xticks=[], yticks=[])
        return
    columns = sorted({column for column, _ in grid})
    rows = sorted({row for _, row in grid})
    values = np.full((len(rows), len(columns)), np.nan)
    for (column, row), value in grid.items():
        if value is not None:
            values[rows.index(row), columns.index(column)] = value
    axis.imshow(values, cmap="viridis", aspect="auto", vmin=limits[0], vmax=limits[1])
    middle = np.mean(limits)
    for (i, j), value in np.ndenumerate(values):
        if np.isfinite(value):
            color = "white" if value <= middle else "black"
            axis.text(j, i, format(value, form), ha="center", va="center", color=color, size=9)
    axis.set_xticks(range(len(columns)), [f"{c:g}" for c in columns])
    axis.set_yticks(range(len(rows)), [f"{r:g}" for r in rows])
    axis.set(xlabel=x_label, ylabel=y_label)


def frontier(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other one beats in both cost (first, less is better) and quality, by rising cost."""
    best: list[tuple[float, float]] = []
    for cost, quality in sorted(points, key=lambda p: (p[0], -p[1])):
        if not best or quality > best[-1][1]:
            best.append((cost, quality))
    return best


def pareto(axis: Any, points: Mapping[str, Sequence[tuple[float, float]]], x_label: str, y_label: str) -> None:
    """Draw all models as faint dots, each router's frontier as a line."""
    for router, all_points in points.items():
        color = COLORS[router]
        axis.scatter(*zip(*all_points, strict=True), s=14, color=color, alpha=0.35, lw=0)
        axis.plot(*zip(*frontier(all_points), strict=True), color=color, marker="o", ms=5, label=NAMES[router])
    axis.set_xscale("log")
    round_ticks(axis)
    finish(axis, x_label, y_label)


def round_ticks(axis: Any) -> None:
    """Put ticks at 1, 2, 5, 10, ... on a logarithmic axis, however short it is."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator

    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    axis.xaxis.set_minor_locator(NullLocator())


def label(number: str, *, paper: bool = False) -> str:
    return PAPER_QUALITY[number] if paper else QUALITY[number]


def said(drawing: Any, text: str) -> None:
    """Write the paper's words above our figure, where it prints no numbers."""
    drawing.suptitle(f"The paper: {text}", fontsize=9, color="#555555")


__all__ = [
    "COLORS", "NAMES", "PAPER_QUALITY", "ROUTING", "bars", "curve", "finish", "frontier", "heat", "label", "legend",
    "line", "panels", "pareto", "powers", "round_ticks", "said", "waterfall",
]  # fmt: skip
