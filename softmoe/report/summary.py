"""What runs cost and reached, and in which settings they differ."""

from softmoe.budget import cost
from softmoe.report.runs import RunRecord
from softmoe.train.strict import flatten

COLUMNS = ("run", "parameters", "MFLOP/image", "steps", "images", "TFLOP", "seconds", "top-1 %", "top-5 %", "loss")


def summary_table(runs: list[RunRecord]) -> list[tuple[str, ...]]:
    """A header and a line per run, as text."""
    lines: list[tuple[str, ...]] = [COLUMNS]
    for run in runs:
        price = cost(run.model)
        lines.append(
            (
                run.name,
                f"{price.params:,}",
                f"{price.forward_flops / 1e6:.1f}",
                show(run.last("step"), ",.0f"),
                show(run.last("images"), ",.0f"),
                show(run.last("flops"), ",.1f", 1e-12),
                show(run.last("device_seconds"), ",.0f"),
                show(run.last("val/top1"), ".2f", 100),
                show(run.last("val/top5"), ".2f", 100),
                show(run.last("val/loss"), ".3f"),
            )
        )
    return lines


def show(value: float | None, form: str, factor: float = 1.0) -> str:
    return "-" if value is None else format(value * factor, form)


def differences(runs: list[RunRecord]) -> list[tuple[str, ...]]:
    """The settings in which the runs differ: a line per key, a column per run."""
    settings = [flatten(run.config.to_dict()) for run in runs]
    keys = {key: None for s in settings for key in s if key != "run_name"}  # routers have options of their own
    rows = {key: [s.get(key) for s in settings] for key in keys}
    return [
        (key, *("-" if value is None else str(value) for value in values))
        for key, values in rows.items()
        if any(value != values[0] for value in values)
    ]


def as_text(lines: list[tuple[str, ...]]) -> str:
    """Columns under each other: the first to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
