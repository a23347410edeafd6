"""Report on a run while it runs: the progress line, lines of metrics, evaluations, warnings."""

import math
from typing import Any

import torch

from softmoe.data import Feed
from softmoe.storage.files import write_json
from softmoe.storage.settings import flatten
from softmoe.train.evaluation import evaluate_share
from softmoe.train.health import model_health
from softmoe.train.log import Clock, duration, peak_flops, progress_line
from softmoe.train.run import Run
from softmoe.train.step import autocast

LONG = 1800.0  # seconds; a run that will take longer says so as soon as its speed is known


class Diverged(ValueError):
    """Raised if loss or gradient were not finite for too many steps in a row."""


def show_progress(run: Run, clock: Clock) -> None:
    steps_per_second = clock.steps_per_second(run.done.step)
    images_per_second = steps_per_second * run.config.data.batch_size
    share = images_per_second * run.flops_per_image / (run.team.world * peak_flops(run.device, run.autocast))
    left = (run.config.steps - run.done.step) / max(steps_per_second, 1e-9)
    if not clock.estimated and math.isfinite(left):
        clock.estimated = True
        if left > LONG:
            fewer = run.done.step + max(1, int(LONG * steps_per_second))
            run.progress.report(
                f"at this speed the run takes {duration(left)} more; --steps {fewer} ends in about {duration(LONG)}"
            )
    rate = run.schedule(run.done.step - 1)
    run.progress.show(progress_line(run.done.step, run.config.steps, run.loss, rate, images_per_second, share, left))


def report_bad_steps(run: Run) -> None:
    """Report the steps that were skipped. Raise Diverged if there were too many in a row."""
    bad, run.bad_steps = run.bad_steps, []
    for step, loss in bad:
        run.progress.report(f"step {step}: loss {loss} or its gradient is not finite; the step is skipped")
    if bad and run.done.bad_in_a_row >= run.config.max_bad_steps:
        raise diverged(run, f"{run.done.bad_in_a_row} steps in a row gave no finite loss and gradient")


def diverged(run: Run, reason: str) -> Diverged:
    run.store.wait()
    good = run.store.last_good
    kept = "there is no checkpoint yet" if good is None else f"the last good checkpoint is {run.store.path(good)}"
    return Diverged(
        f"stopped at step {run.done.step}: {reason}; {kept}. Lower schedule.peak, lengthen schedule.warmup, set "
        "optim.clip_norm to 1, or use precision float32"
    )


def report_starving(run: Run, feed: Feed) -> None:
    """Report that the device waits for data, if it did in most steps since the last line of metrics."""
    starved, feed.starved = feed.starved, 0
    if starved > run.config.log.every / 2:
        run.progress.report(
            f"step {run.done.step}: the device waited for data in {starved} of the last {run.config.log.every} steps; "
            f"raise data.workers ({run.data.loader.workers} now), or store images at a smaller size"
        )


def log(run: Run) -> None:
    """Write one line of metrics: means since the line before, totals since the start."""
    done = run.done
    count = done.good_steps or math.nan
    record: dict[str, Any] = {
        "step": done.step,
        "loss": done.loss_sum / count,
        "auxiliary_loss": done.auxiliary_sum / count,
        "grad_norm": done.norm_sum / count,
        "learning_rate": run.schedule(done.step - 1),
        **{f"objective/{name}": total / count for name, total in done.objective_sums.items()},
        "skipped_steps": done.skipped,
        **run.totals(),
    }
    if run.recording.routings:
        record["routers"] = health = model_health(run.recording.routers, run.recording.routings)
        run.recording.clear()
        for warning in run.watch.warnings(health):
            run.progress.report(f"step {done.step}: {warning}")
    write_metrics(run, record)
    done.loss_sum = done.auxiliary_sum = done.norm_sum = 0.0
    done.good_steps = 0
    done.objective_sums = {}


def write_metrics(run: Run, record: dict[str, Any]) -> None:
    problem = run.metrics.write(record)
    if problem:
        run.progress.report(f"could not write {run.metrics.path}: {problem}; its lines wait in memory")
    numbers = {key: float(value) for key, value in flatten(record).items() if key != "step"}
    for sink in run.sinks:
        sink.write(run.done.step, numbers)


def best_entry(key: str, numbers: dict[str, float]) -> dict[str, Any]:
    """Return the number of this name and, if there is one, the loss of the same evaluator, for `sort_key`."""
    loss = f"{key.rpartition('/')[0]}/loss"
    return {"name": key, "value": numbers[key]} | ({"loss": numbers[loss]} if loss in numbers else {})


def sort_key(found: dict[str, Any]) -> tuple[float, float]:
    """Order evaluations by the number, then by the loss: with few images many have the same accuracy."""
    return found["value"], -found.get("loss", 0.0)


def report_unreadable(run: Run, known: int) -> None:
    """Report the validation images, of all processes, that cannot be read, if there are more than were `known`."""
    found = run.data.unreadable
    for share in run.team.gather(found):
        found.update(share)
    if len(found) > known:
        name, reason = next(iter(found.items()))
        run.progress.report(
            f"step {run.done.step}: validation images left out because they cannot be read: {len(found)}; the first is "
            f"{name}: {reason}"
        )


def evaluate(run: Run) -> bool:
    """Run the evaluators, on the average of the weights if there is one. Return True if this is the best step so far.

    A skipped step is never the best: its weights are those of a step before it.
    """
    done, key, known = run.done, run.config.evaluation.best, len(run.data.unreadable)
    done.evaluating = True
    model = run.model if run.average is None else run.average.model
    model.eval()
    numbers: dict[str, float] = {}
    for name, evaluator in run.evaluators.items():
        with autocast(run), torch.no_grad():
            found = evaluate_share(evaluator, model, run.data, run.team)
        numbers |= {f"{name}/{what}": value for what, value in found.items()}
    report_unreadable(run, known)
    if key not in numbers:
        raise ValueError(f"evaluation.best is {key!r}, but the evaluators give: {', '.join(numbers)}")
    done.evaluation, done.evaluating = {"step": done.step, "numbers": numbers}, False
    write_metrics(run, {"step": done.step, **numbers, **run.totals()})
    if not run.progress.quiet:
        run.progress.report(f"step {done.step}: " + ", ".join(f"{n} {value:.4f}" for n, value in numbers.items()))
    found = {"step": done.step} | best_entry(key, numbers)
    improved = not done.bad_in_a_row and (done.best is None or sort_key(found) > sort_key(done.best))
    done.stale = 0 if improved else done.stale + 1
    if improved:
        done.best = found
    if not run.team.leads:
        return improved
    try:
        write_json(run.folder.evaluation, {"step": done.step, "numbers": numbers, "best": done.best})
    except OSError as error:
        run.progress.report(f"could not write {run.folder.evaluation}: {error}; training goes on")
    return improved
