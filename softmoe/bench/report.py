"""Show rows of timings as a table on the screen, as JSON, against those of another day, and as a picture.

The page of `softmoe selftest` is made here too.
"""

import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from softmoe import __version__
from softmoe.accelerate import fastest
from softmoe.bench.cases import Row
from softmoe.bench.timing import Roofline, Timing, cpu_name, machine_facts
from softmoe.storage.files import write_json


def as_text(rows: Iterable[Row]) -> Iterator[str]:
    """Format rows as lines, case by case; times also as multiples of the case's first row (above 1: slower)."""
    for (case, phase), group in groupby(rows, key=lambda row: (row.case, row.phase)):
        yield f"{case}, {phase}"
        first: Row | None = None
        for row in group:
            first = first or row
            ratio = row.timing.median / first.timing.median
            share = "" if row.roofline is None else f"   roofline {row.roofline:5.2f}"
            memory = "" if row.peak_bytes is None else f"   peak {row.peak_bytes / 1e9:6.2f} GB"
            yield (
                f"  {row.name:<38} {1e3 * row.timing.median:9.2f} ms  ± {100 * row.timing.spread:4.1f} %"
                f"   {ratio:6.2f} x{share}{memory}"
            )


def save(rows: list[Row], roofline: Roofline, path: Path) -> None:
    write_json(path, {"machine": machine_facts(roofline), "rows": [asdict(row) for row in rows]}, indent=1)


def load(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """Read the machine and the rows of an earlier run."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        rows = [Row(**{**row, "timing": Timing(**row["timing"])}) for row in saved["rows"]]
        return saved["machine"], rows
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} does not hold timings written by `softmoe bench --json`: {error}") from error


def differences(old: Iterable[Row], new: Iterable[Row]) -> Iterator[str]:
    """Yield a line for each row of both runs that moved beyond the noise, and how many did not."""
    before = {(row.case, row.phase, row.name): row for row in old}
    still = fresh = 0
    for row in new:
        past = before.pop((row.case, row.phase, row.name), None)
        if past is None:
            fresh += 1
        elif not moved(past.timing, row.timing):
            still += 1
        else:
            ratio = row.timing.median / past.timing.median
            word = "slower" if ratio > 1 else "faster"
            yield (
                f"{word}: {row.case}, {row.phase}, {row.name}: {1e3 * past.timing.median:.2f} -> "
                f"{1e3 * row.timing.median:.2f} ms ({max(ratio, 1 / ratio):.2f} x)"
            )
    yield f"within the noise: {still} rows; only now: {fresh}; only before: {len(before)}"


def moved(old: Timing, new: Timing) -> bool:
    """Tell if two medians differ by more than twice their joint spread, and by more than 3 %."""
    noise = max(2 * math.hypot(old.spread, new.spread), 0.03)
    return abs(math.log(new.median / old.median)) > math.log1p(noise)


def draw(rows: list[Row], title: str, path: Path) -> None:
    """Draw curves over the number of experts if every case is such a number; else a bar for each row."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install 'softmoe-vit[plots]'") from error
    if all(row.case.removesuffix(" experts").isdigit() for row in rows):
        figure, axes = pyplot.subplots(figsize=(7, 4))
        draw_curves(axes, rows)
    else:
        figure, axes = pyplot.subplots(figsize=(9, 1 + 0.28 * len(rows)))
        draw_bars(axes, rows)
    axes.set_title(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_curves(axes: Any, rows: list[Row]) -> None:
    """Draw the speed of each contender over the number of experts, and its roofline dotted."""
    for name in dict.fromkeys(row.name for row in rows):
        own = [row for row in rows if row.name == name]
        x = [int(row.case.removesuffix(" experts")) for row in own]
        y = [1 / row.timing.median for row in own]
        (line,) = axes.plot(x, y, marker="o", label=name)
        best = [value / row.roofline for value, row in zip(y, own, strict=True) if row.roofline]
        if len(best) == len(x):
            axes.plot(x, best, linestyle=":", color=line.get_color())
    axes.set(xscale="log", yscale="log", xlabel="experts", ylabel="images a second (dotted: the roofline)")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def draw_bars(axes: Any, rows: list[Row]) -> None:
    """Draw a bar for each row, with one color for each case and phase."""
    times = [1e3 * row.timing.median for row in rows]
    groups = list(dict.fromkeys((row.case, row.phase) for row in rows))
    colors = [f"C{groups.index((row.case, row.phase)) % 10}" for row in rows]
    errors = [time * row.timing.spread for time, row in zip(times, rows, strict=True)]
    axes.barh(range(len(rows)), times, xerr=errors, color=colors)
    axes.set_yticks(range(len(rows)), [f"{row.case}, {row.phase}: {row.name}" for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="ms")


VARIABLES = ("CUDA_", "CUBLAS_", "NCCL_", "OMP_", "PYTORCH_", "SOFTMOE_", "TORCH_", "TRITON_")
"""How the names of those variables begin that change how models are computed."""


@dataclass(frozen=True)
class Check:
    """One line of the selftest's page."""

    name: str
    state: str
    """ok, WRONG, or not tested."""
    said: str
    seconds: float
    what: str = ""
    """A sentence that says what is checked."""


def facts(device: torch.device) -> dict[str, str]:
    """Collect facts of the machine for the page, and none of its user."""
    found = {"softmoe": __version__, "torch": torch.__version__, "python": platform.python_version()}
    found |= {"triton": version_of("triton"), "system": f"{platform.system()} {platform.machine()}", "cpu": cpu_name()}
    found |= {"cores": str(os.cpu_count()), "threads": str(torch.get_num_threads())}
    told = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)]
    found["environment"] = without_user(" ".join(told)) or "nothing set"
    if device.type == "cuda":
        for index in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(index)
            found[f"cuda:{index}"] = f"{p.name}, sm_{p.major}{p.minor}, {p.total_memory / 1e9:.0f} GB"
        found["CUDA"], found["cuDNN"] = str(torch.version.cuda), str(torch.backends.cudnn.version())
        found["driver"] = driver()
    return found


def driver() -> str:
    """Ask NVIDIA's own tool for the version of the driver."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return "not known"


def lines_of(error: BaseException) -> str:
    """Return the last lines of this package that an error came through, and the one that raised it."""
    frames = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
    ours = [frame for frame in frames[:-1] if frame.startswith(str(Path(__file__).parents[1]))]
    return " > ".join([*ours[-2:], *frames[-1:]])


def without_user(text: str) -> str:
    """Return a text without the folders of this machine, which may have the name of its user."""
    folders = {f"{Path(__file__).parents[2]}/": "", sys.prefix: "python", tempfile.gettempdir(): "tmp"}
    folders[str(Path.home())] = "~"
    for folder in sorted(folders, key=len, reverse=True):
        text = text.replace(folder, folders[folder])
    return text


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def page(checks: list[Check], machine: dict[str, str], device: torch.device, *, quick: bool) -> str:
    """Format as Markdown the outcome, the machine, a row for each check, and the kernels chosen for each shape."""
    wrong = sum(check.state == "WRONG" for check in checks)
    missing = [check.name for check in checks if check.state == "not tested"]
    form = " (quick form)" if quick else ""
    lines = [
        f"# softmoe selftest on {device}{form}",
        "",
        f"{len(checks) - wrong - len(missing)} checks are right, {wrong} wrong, {len(missing)} not tested here"
        + (f" ({', '.join(missing)})." if missing else "."),
        "",
        "; ".join(f"{key} {value}" for key, value in machine.items()),
        "",
        "| check | | found | seconds |",
        "|---|---|---|---|",
        *(f"| {c.name} | {c.state} | {c.said.replace('|', '/')} | {c.seconds:.1f} |" for c in checks),
    ]
    timed = fastest.timings()
    if timed:
        lines += ["", "Kernels that were timed against torch:", "", *(f"- {line}" for line in timed)]
    done = [f"- {c.name}: {c.what}" for c in checks if c.what]
    lines += [
        "",
        "What the checks do (`off by` is the norm of the difference over that of the right numbers):",
        "",
        *done,
    ]
    return "\n".join(lines) + "\n"
