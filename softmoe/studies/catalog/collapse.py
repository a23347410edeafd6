"""What goes wrong without the normalization of tokens and slots?

Soft MoE with and without it, for growing width, and for growing learning rate.

The paper (Appendix E; 6 blocks, 256 experts): without it the softmax of wide models approaches one-hot vectors (the
largest dispatch weight of a slot goes to 1), and accuracy falls with the width and with the learning rate. At small
width it makes little difference.
"""

from collections.abc import Iterator
from typing import Any

from softmoe.report import load_run
from softmoe.studies.figures import finish, legend, panels, said
from softmoe.studies.lab import Cell, Lab, wide
from softmoe.studies.results import Claim, Row, Table, better

STYLE = {True: ("#3b6fb6", "normalized"), False: ("#c8403a", "not normalized")}


def cells(lab: Lab) -> Iterator[Cell]:
    """Vary the width at the base's learning rate, then the rate at one width. The scale starts at the paper's 1."""
    base = lab.base.schedule.peak
    widths = lab.pick(tiny=(16, 32), small=(32, 128), paper=(384, 768, 1024, 1280, 1664))
    at, peaks = lab.pick(tiny=(16, (0.1,)), small=(32, (6e-2,)), paper=(1664, (3e-4, 3e-3)))
    for width, peak in [*((width, base) for width in widths), *((at, peak) for peak in peaks)]:
        shape = wide(width) if lab.scale != "paper" else {"width": width, "depth": 6, "mlp_dim": 1536, "heads": 16}
        for normalize in (True, False):
            config = lab.config("soft", peak=peak, normalize=normalize, scale_init=1.0, **shape)
            yield from lab.over_seeds(config, width=width, peak=peak, normalize=normalize)


def claims(table: Table) -> Iterator[Claim]:
    base = table.distinct("peak")[0]
    widths = sorted(table.where(peak=base).distinct("width"))
    on, off = (table.where(peak=base, normalize=normalize) for normalize in (True, False))
    for number, words in (("max_dispatch", "dispatch weight of a slot"), ("max_combine", "combine weight of a token")):
        wide_off, narrow_off = off.where(width=widths[-1]), off.where(width=widths[0])
        growth = wide_off.minus(narrow_off, number)
        yield Claim(f"without it the largest {words} grows with the width", growth, "yes", "of weight")
        gap = wide_off.minus(on.where(width=widths[-1]), number)
        yield Claim(f"without it the largest {words} is larger (width {widths[-1]})", gap, "yes", "of weight")
    yield from better(on.where(width=widths[-1]), off.where(width=widths[-1]), f"normalizing helps, width {widths[-1]}")
    for peak in table.distinct("peak")[1:]:
        fast_on, fast_off = (table.where(peak=peak, normalize=normalize) for normalize in (True, False))
        yield from better(fast_on, fast_off, f"normalizing helps at the learning rate {peak:g}")
        gap = fast_off.minus(fast_on, "max_dispatch")
        yield Claim(f"the dispatch weights are sharper without it, rate {peak:g}", gap, "yes", "of weight")


def figure(table: Table, lab: Lab) -> Any:
    """Draw curves over training, a column for each width and learning rate, as in the paper."""
    columns = list(dict.fromkeys((row.labels["width"], row.labels["peak"]) for row in table))
    lines = (("loss", "training loss"), ("max_dispatch", "largest dispatch weight"), ("max_combine", "largest combine"))
    drawing, axes = panels(len(lines), len(columns), width=3.2, height=2.6)
    for column, (width, peak) in enumerate(columns):
        for row in table.where(width=width, peak=peak):
            color, name = STYLE[row.labels["normalize"]]
            for axis, (number, _) in zip(axes[:, column], lines, strict=True):
                axis.plot(*curve(row, number), color=color, lw=1, alpha=0.8, label=name if row.seed == 0 else None)
        for axis, (_, words) in zip(axes[:, column], lines, strict=True):
            finish(axis, "step", words if column == 0 else "")
        axes[0][column].set_title(f"width {width}, peak rate {peak:g}", fontsize=10)
    legend(axes[1][0])
    said(drawing, "without normalization the weights approach 1 as width or rate grow, and accuracy falls (Appendix E)")
    return drawing


def curve(row: Row, number: str) -> tuple[list[float], list[float]]:
    """Read a curve over the steps of a run; weights are means over its layers."""
    run = load_run(row.folder)
    if number == "loss":
        return run.curve("step", "loss")
    curves = list(run.routers(number).values())
    if not curves:
        return [], []
    return list(curves[0][0]), [sum(values) / len(values) for values in zip(*(ys for _, ys in curves), strict=True)]
