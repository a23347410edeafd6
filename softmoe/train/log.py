"""The outputs of a running training: metrics.jsonl, the progress line, TensorBoard and Weights & Biases."""

import json
import math
import os
import shutil
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch

from softmoe.storage.files import sync_file, write_text
from softmoe.train.config import TrainConfig

_LONGEST_LINE = 1_000_000  # bytes; a line of zeros may have gigabytes
_SIDE = {"cpu": 1024}  # of the matrices by which a device's peak is measured; 8192 elsewhere


class MetricsFile:
    """Writes metrics.jsonl: one JSON object per line, each with its step, in the order of the steps.

    `rewind(step)` drops the lines that a killed run wrote after the checkpoint it resumes from, so that the file
    becomes that of an uninterrupted run. If the disk is full, lines wait in memory until there is room. Without a path
    nothing is written: of many processes only one keeps the file.
    """

    def __init__(self, path: Path | None):
        self.path = path
        self.waiting: list[str] = []

    def rewind(self, step: int) -> int:
        """Drop the lines after this step. Return how many damaged ones went too, without one that a kill cut short."""
        if self.path is None or not self.path.exists():
            return 0
        rows, damaged = scan_metrics(self.path)
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step))
        return damaged

    def write(self, record: dict[str, Any]) -> str | None:
        """Append one line; return the reason if it has to wait."""
        if self.path is None:
            return None
        self.waiting.append(json.dumps(finite(record)) + "\n")
        return self.write_waiting()

    def write_waiting(self) -> str | None:
        """Append the lines that wait; return the reason if they still have to."""
        if self.path is None or not self.waiting:
            return None
        before = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(self.waiting))
        except OSError as error:
            if self.path.exists():
                os.truncate(self.path, before)
            return str(error)
        self.waiting = []
        return None

    def flush(self) -> None:
        """Sync the file to disk, before a checkpoint says that this step was reached."""
        if self.path is None:
            return
        with suppress(OSError):  # a disk that cannot do this will say so when the checkpoint is written
            sync_file(self.path)


def finite(value: Any) -> Any:
    """Replace numbers that are not finite by None, since JSON has none."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl without damaged ones and without a last one that is being written."""
    return scan_metrics(path)[0]


def scan_metrics(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the lines of a metrics.jsonl, and how many others are damaged.

    A last line without its newline is being written, or was cut short by a kill: it is neither returned nor counted.
    """
    rows, damaged = [], 0
    with path.open("rb") as file:
        while line := file.readline(_LONGEST_LINE):
            try:
                row = json.loads(line.decode(errors="replace"))
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
            elif line.endswith(b"\n"):
                damaged += 1
    return rows, damaged


class Sink(Protocol):
    """A receiver of metrics besides metrics.jsonl."""

    def write(self, step: int, numbers: dict[str, float]) -> None: ...

    def close(self) -> None: ...


def make_sinks(config: TrainConfig, folder: Path, step: int) -> list[Sink]:
    """Make the sinks that the config asks for. The run continues at `step`; later steps they know are dropped."""
    sinks: list[Sink] = []
    if config.log.tensorboard:
        sinks.append(TensorBoard(folder / "tensorboard", step))
    if config.log.wandb:
        sinks.append(WeightsAndBiases(config, folder))
    return sinks


class TensorBoard:
    def __init__(self, folder: Path, step: int):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ModuleNotFoundError(
                "log.tensorboard needs the extra: pip install 'softmoe-vit[tensorboard]'"
            ) from error
        self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    def __init__(self, config: TrainConfig, folder: Path):
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ModuleNotFoundError("log.wandb needs the extra: pip install 'softmoe-vit[wandb]'") from error
        self._run = wandb.init(
            project=config.log.wandb, id=config.run_name, dir=str(folder), config=config.to_dict(), resume="allow"
        )

    def write(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log(numbers, step=step)

    def close(self) -> None:
        self._run.finish()


class Progress:
    """Shows progress: one line that is overwritten on a terminal or in a notebook, else a line every `seconds`."""

    def __init__(self, seconds: float, *, quiet: bool = False, stream: TextIO | None = None):
        self.seconds, self.quiet = seconds, quiet
        self.stream = stream or sys.stderr
        self.live = self.stream.isatty() or in_notebook()
        self._next = 0.0
        self._shown = 0

    def due(self, *, tenth: bool = False) -> bool:
        """Tell if it is time for a line. A log file also gets one at each tenth of the run, however short it is."""
        return not self.quiet and (time.monotonic() >= self._next or (tenth and not self.live))

    def show(self, line: str) -> None:
        self._next = time.monotonic() + (0.25 if self.live else self.seconds)
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            self.stream.write("\r" + line[:width].ljust(self._shown))
            self._shown = min(len(line), width)
        else:
            self.stream.write(line + "\n")
        self.stream.flush()

    def report(self, message: str) -> None:
        """Write a line that stays."""
        if self.live and self._shown:
            self.stream.write("\r" + " " * self._shown + "\r")
            self._shown = 0
        self.stream.write(message + "\n")
        self.stream.flush()

    def close(self) -> None:
        if self.live and self._shown:
            self.stream.write("\n")
            self._shown = 0
            self.stream.flush()


def progress_line(
    step: int, steps: int, loss: float, rate: float, images_per_second: float, peak_share: float, left: float
) -> str:
    """Format the progress line. Before the second step the speed is not known, and NaN; the peak may never be.

    A step that is faster than the peak says that other work took the processor while the peak was measured: the share
    is not known then, and left out.
    """
    if math.isnan(images_per_second):
        return f"step {step:>{len(str(steps))}}/{steps} | loss {loss:.4f} | lr {rate:.2e}"
    share = f" | {peak_share:.0%} of peak" if peak_share <= 1.0 else ""
    speed = f"{images_per_second:,.0f}" if images_per_second >= 100 else f"{images_per_second:.1f}"
    return (
        f"step {step:>{len(str(steps))}}/{steps} | loss {loss:.4f} | lr {rate:.2e} | {speed} images/s{share} | "
        f"{duration(left)} left"
    )


def duration(seconds: float) -> str:
    """Return a time as people say it: 7s, 1m30s, 2h05m; from two days on in days or years."""
    if not math.isfinite(seconds):
        return "?"
    for unit, size in (("years", 31_557_600), ("days", 86_400)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    running = shell.get_ipython() if shell else None
    return type(running).__name__ == "ZMQInteractiveShell"


class Clock:
    """Measures the steps per second of this process, without evaluations, saves, and the first step.

    The first step waits for workers and compilers.
    """

    def __init__(self):
        self.step: int | None = None
        self.time = self.speed = math.nan
        self.estimated = False
        """Whether the remaining time was reported."""

    def steps_per_second(self, step: int) -> float:
        """Return the mean since the last call at least half a second ago; NaN at the first step."""
        now = time.perf_counter()
        if self.step is None or step == self.step:
            return self.speed
        if now - self.time > 0.5 or math.isnan(self.speed):
            self.speed = (step - self.step) / max(now - self.time, 1e-9)
            self.step, self.time = step, now
        return self.speed

    def begin(self, step: int) -> None:
        """Start counting, if this is the first step that was done."""
        if self.step is None:
            self.step, self.time = step, time.perf_counter()

    def skip(self, seconds: float) -> None:
        self.time += seconds


@cache
def peak_flops(device: torch.device, dtype: torch.dtype | None = None, tries: int = 5) -> float:
    """Return the best rate of a square product in FLOPs per second, measured once per process in about 0.1 s.

    NaN if the training has left no memory for that.
    """
    side = _SIDE.get(device.type, 8192)
    taken: list[float] = []
    with torch.no_grad(), suppress(torch.OutOfMemoryError):
        x = torch.ones(side, side, device=device, dtype=dtype or torch.float32)
        for _ in range(tries):
            wait(device)
            start = time.perf_counter()
            torch.mm(x, x)
            wait(device)
            taken.append(time.perf_counter() - start)
    return 2.0 * side**3 / min(taken, default=math.nan)


def wait(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
