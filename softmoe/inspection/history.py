"""What the course of a training run tells: steps that failed, gradients that jump, data that comes too late."""

import time
from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

from softmoe.inspection.doctor import Verdict

SKIPPED = 0.001
SPIKE = 5.0  # times the median of the lines before
SPIKES = 0.05
LOSS_RISE = 1.2
LOADER_BUSY = 0.8
SERIAL_SHARE = 0.3
SCALE_DRIFT = 30.0
_LINES = 8

Rows = Sequence[Mapping[str, Any]]
_RATE = (
    "the learning rate is past what is stable: lower schedule.peak, lengthen schedule.warmup, set optim.clip_norm to 1"
)


def examine_history(rows: Rows, warmup: int = 0) -> list[Verdict]:
    """`rows` are the lines of metrics.jsonl, in order."""
    training = [row for row in rows if "grad_norm" in row]
    if not training:
        return [Verdict("course of training", None, "metrics.jsonl has no line of training yet")]
    return [_skipped(training), _spikes(training, warmup), _loss(training), *_drift(training)]


def _skipped(rows: Rows) -> Verdict:
    steps, skipped = rows[-1]["step"], rows[-1].get("skipped_steps", 0)
    figure = f"{skipped} of {steps} steps had no finite loss or gradient"
    return Verdict("skipped steps", skipped > SKIPPED * steps, figure, f"at most {SKIPPED:.1%}", _RATE)


def _spikes(rows: Rows, warmup: int) -> Verdict:
    norms = [row["grad_norm"] for row in rows if row["step"] > warmup and row["grad_norm"] is not None]
    if len(norms) < _LINES:
        return Verdict("gradient spikes", None, f"{len(norms)} lines of metrics after the warm-up are too few to tell")
    later = range(4, len(norms))
    spikes = sum(norms[i] > SPIKE * median(norms[max(0, i - 20) : i]) for i in later)
    share = spikes / len(later)
    figure = f"{spikes} of {len(later)} lines have a gradient norm over {SPIKE:g} times the usual"
    return Verdict("gradient spikes", share > SPIKES, figure, f"at most {SPIKES:.0%}", _RATE)


def _loss(rows: Rows) -> Verdict:
    losses = [row["loss"] for row in rows if row.get("loss") is not None]
    if len(losses) < _LINES:
        return Verdict("loss going up", None, f"{len(losses)} lines of metrics are too few to tell")
    smooth = [mean(losses[i : i + 3]) for i in range(len(losses) - 2)]
    rise = smooth[-1] / min(smooth) if min(smooth) > 0 else 1.0
    figure = f"the last loss is {rise:.2f} times the lowest"
    return Verdict("loss going up", rise > LOSS_RISE, figure, f"at most {LOSS_RISE:g} times", _RATE)


def _drift(rows: Rows) -> list[Verdict]:
    """How far the routers' scales went since the first line."""
    moved = {}
    for layer, last in (rows[-1].get("routers") or {}).items():
        start = next((r["routers"][layer].get("scale") for r in rows if layer in (r.get("routers") or {})), None)
        if start and last.get("scale"):
            moved[layer] = (start, last["scale"])
    if not moved:
        return []
    layer = max(moved, key=lambda name: _factor(*moved[name]))
    start, end = moved[layer]
    return [
        Verdict(
            "scale drift",
            _factor(start, end) > SCALE_DRIFT,
            f"from {start:.3g} to {end:.3g} in {layer.removeprefix('encoder.')}",
            f"at most {SCALE_DRIFT:g} times, same sign",
            "the routers run away: lower the learning rate, set optim.scale_decay",
        )
    ]


def _factor(start: float, end: float) -> float:
    ratio = end / start
    return float("inf") if ratio <= 0 else max(ratio, 1 / ratio)


def examine_loading(rows: Rows, workers: int, batches: Any, batch_size: int) -> Verdict:
    """Could the loader keep up? `batches[step]` makes one training batch, as a worker would; it is timed here."""
    last = next((row for row in reversed(rows) if row.get("device_seconds")), None)
    if last is None:
        return Verdict("data loading", None, "the run has noted no time yet")
    trained = last["images"] / last["device_seconds"]
    seconds = []
    for step in range(3):  # the best of three: other work on this machine only adds
        begun = time.perf_counter()
        batches[step]
        seconds.append(time.perf_counter() - begun)
    loaded = batch_size / min(seconds) * max(workers, 1)
    share, limit = trained / loaded, LOADER_BUSY if workers else SERIAL_SHARE
    how = (
        f"{workers} worker{'s' * (workers != 1)} could read" if workers else "reading inside the training process gives"
    )
    return Verdict(
        "data loading",
        share > limit,
        f"{how} {loaded:,.0f} images/s here, the run used {trained:,.0f} ({share:.0%})",
        f"at most {limit:.0%}",
        "training waits for images: raise data.workers, install softmoe[fast], or store images at a smaller size",
    )
