"""The loop: build -> resume -> step -> log -> evaluate -> save. One for every task; a task is an objective given to it.

A run is a pure function of its settings: weights, order of data and random numbers depend on (seed, step) only, so a
run that was killed anywhere and started again ends with the same bits as one that was not.
"""

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

from torch import Tensor

from softmoe.accelerate.guards import is_async
from softmoe.data import WorkerDied
from softmoe.machine import event_on
from softmoe.parallel import local
from softmoe.storage.architecture import parse_architecture
from softmoe.storage.checkpoint import Checkpoint, Snapshot, copy_tensors, optimizer_tensors
from softmoe.storage.checkpoint import restore as restore_tensors
from softmoe.train.config import TrainConfig
from softmoe.train.data import Extract
from softmoe.train.distributed import process_team
from softmoe.train.evaluation import Evaluator
from softmoe.train.folder import RunFolder, differences, way_out
from softmoe.train.log import Clock, make_sinks
from softmoe.train.objectives import Objective
from softmoe.train.reporting import diverged, evaluate, log, report_bad_steps, report_starving, show_progress
from softmoe.train.run import Run, TrainState, build
from softmoe.train.step import count_pending_step, train_step


@dataclass(frozen=True)
class Result:
    """The outcome of a run. `signal` is the number of the signal that stopped it, or None if it finished."""

    folder: RunFolder
    step: int
    numbers: dict[str, float]
    """What the last evaluation found; empty if there was none."""
    signal: int | None = None
    rank: int = 0
    """The number of this process, where there are several."""
    problems: tuple[str, ...] = ()
    """Sentences on what could not be kept: the last step, lines of metrics."""


class StopRequest:
    """Lets SIGTERM and SIGINT stop a run after the step it is in; a second signal stops it at once.

    `with StopRequest() as stop:` then look at `stop.signal` between steps (None while nobody asked).
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # elsewhere handlers cannot be set
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)


def train(
    config: TrainConfig,
    *,
    objective: Objective | None = None,
    evaluators: Mapping[str, Evaluator] | None = None,
    extract: Extract | None = None,
) -> Result:
    """Train, from the start or from the newest checkpoint in the run's folder, until the last step or a signal.

    `evaluators` maps the first part of a number's name to a function of model and validation batches; the default is
    {"val": accuracy and loss}. `extract` (softmoe.evaluate.extract) lets a locked image tower run only once.
    """
    config = TrainConfig.from_dict(config.to_dict())  # as it is stored, so that the run goes on with what it began
    config.check()
    folder = RunFolder.of(config)
    with ExitStack() as stack:
        team = stack.enter_context(process_team(config.parallel, config.device))
        if team.leads:
            stack.enter_context(folder.locked())
        run = build(config, folder, objective, evaluators, team, extract)
        stack.callback(run.close)
        stack.enter_context(data_warnings_to(run))
        resume(run)
        run.sinks = make_sinks(config, folder.path, run.done.step) if team.leads else []
        stop = stack.enter_context(StopRequest())
        if run.done.evaluating:
            evaluate(run)
            run.saved_step = None
            save(run)
        try:
            stopped = run_steps(run, stop)
        except WorkerDied:
            if team.world == 1:  # several processes cannot agree on a save in the middle of an evaluation
                save(run)
            if stop.signal is None:  # else whoever stopped this process stopped its workers too
                raise
            stopped = stop.signal
        if stopped is not None:
            save(run)
        for line in run.acceleration.timed():
            run.progress.report(line)
        if run.data.loader.broken:
            run.progress.report(f"{len(run.data.loader.broken)} images could not be read and were replaced by others")
    number = None if stopped is None else int(stopped)
    return Result(folder, run.done.step, run.numbers, number, team.rank, tuple(run.problems()))


def run_steps(run: Run, stop: StopRequest) -> signal.Signals | None:
    """Train to the last step, or until all processes know of a signal that one of them got; return that signal.

    A signal that comes after the processes were asked waits in `stop` until they are asked again, a step later.
    """
    config, done = run.config, run.done
    if done.step >= config.steps or out_of_patience(run):
        return run.team.ask(lambda: stop.signal)()[0]
    feed = run.data.feed(run.data.loader.batches(done.step), run.device)
    answer = run.team.ask(lambda: stop.signal, feed.fetch())
    clock, start = Clock(), time.perf_counter()  # now that data workers are there
    while True:
        stopped, failure = answer()
        if failure is not None and stopped is None:
            save(run)
            raise failure
        if stopped is not None or done.step >= config.steps:
            return stopped
        log_now = (done.step + 1) % config.log.every == 0 or done.step + 1 == config.steps
        train_step(run, feed.take(), keep_routing=log_now and config.log.health)
        failure = feed.fetch() if done.step < config.steps else None  # while the device works
        answer = run.team.ask(lambda: stop.signal, failure)
        after_step(run, clock, start, log_now=log_now)
        if log_now:
            report_starving(run, feed)
        if out_of_patience(run):
            stopped, _ = answer()
            save(run)
            return stopped
        start = time.perf_counter()


def out_of_patience(run: Run) -> bool:
    """Tell if the last `evaluation.patience` evaluations were not better than the best before them."""
    patience = run.config.evaluation.patience
    if patience is None or run.done.stale < patience:
        return False
    best = run.done.best or {}
    run.progress.report(
        f"stopped at step {run.done.step}: no evaluation since step {best.get('step')} was better than "
        f"{best.get('name')} {best.get('value', math.nan):.4f}"
    )
    return True


def after_step(run: Run, clock: Clock, start: float, *, log_now: bool) -> None:
    """Stop a diverged run; log, evaluate and save, in this order, where it is time to.

    The time of the step, since `start`, is counted after its numbers are waited for: a GPU computes it meanwhile.
    """
    config, done, every = run.config, run.done, run.config.evaluation.every
    last = done.step == config.steps
    evaluate_now = last or bool(every and done.step % every == 0)
    save_now = last or done.step % config.checkpoint.every == 0
    if log_now or evaluate_now or save_now:
        count_pending_step(run)
    done.device_seconds += time.perf_counter() - start
    if run.progress.due(tenth=done.step % max(1, config.steps // 10) == 0):
        show_progress(run, clock)
    report_bad_steps(run)
    begun = time.perf_counter()
    if log_now:
        log(run)
    improved = evaluate_now and evaluate(run)
    if save_now or (improved and config.checkpoint.keep_best):
        save(run)
    clock.skip(time.perf_counter() - begun)
    clock.begin(done.step)


def resume(run: Run) -> None:
    """Continue from the newest whole checkpoint, or start. ValueError if the folder holds another run."""
    stored, facts = run.folder.stored(), run.facts()
    found = run.store.latest()
    step = found.step if found else 0
    changed = [] if found is None else contradictions(run, found)
    if stored is not None:
        changed += differences(stored[0], run.config, step)
        before = stored[1].pop("accelerate", None)
        if found and before not in (None, run.acceleration.to_dict()):
            run.progress.report("the run was begun with other accelerations: numbers go on to rounding, not to the bit")
        changed += [f"{key}: {old} -> {facts.get(key)}" for key, old in stored[1].items() if facts.get(key) != old]
    if changed:
        lines = "\n  ".join(dict.fromkeys(changed))
        raise ValueError(
            f"{run.folder.path} holds a run of another configuration:\n  {lines}\n"
            f"{way_out(run.config, changed, 'another run_name')}"
        )
    run.team.wait()  # all have read the folder
    if run.team.leads:
        run.folder.begin(run.config, facts | {"accelerate": run.acceleration.to_dict()})
    if found is not None:
        restore(run, found)
        if step < run.config.steps:
            run.progress.report(f"resuming {run.folder.path} at step {step} of {run.config.steps}")
        else:
            run.progress.report(f"{run.folder.path} is finished: all {run.config.steps} steps are done")
    damaged = run.metrics.rewind(step)
    if damaged:
        run.progress.report(f"{damaged} damaged lines of {run.metrics.path} are left out")


def contradictions(run: Run, found: Checkpoint) -> list[str]:
    """List as `key: old -> new` where a checkpoint says other settings or data than the run has."""
    state = found.texts.get("state", {})
    ours = identity(run, found.step)
    if missing := sorted({*ours, "config", "progress"} - state.keys()):
        raise ValueError(f"{found.folder / 'state.json'} does not say {missing[0]!r}, as that of every checkpoint does")
    changed = differences(TrainConfig.from_dict(state["config"]), run.config, found.step)
    changed = changed or [
        f"{key} of {found.folder.name}: {state[key]!r:.200} -> {value!r:.200}"
        for key, value in ours.items()
        if state[key] != value
    ]
    if not changed and parse_architecture(found.texts.get("config", {})) != run.model.config:
        raise ValueError(f"{found.folder / 'config.json'} describes another model than this run's")
    return changed


def identity(run: Run, step: int) -> dict[str, Any]:
    """Return what a checkpoint of a step says of the run beside its settings and its progress."""
    data = {"next_step": step, "fingerprint": run.data.train.fingerprint}
    return {"step": step, "seed": run.config.seed, "data": data, "classes": list(run.data.train.classes)}


def restore(run: Run, found: Checkpoint) -> None:
    average = None if run.average is None else run.average.model
    restore_tensors(found, run.model, run.optimizer, average, run.team.group)
    run.done = TrainState.read(found.texts["state"]["progress"])
    run.saved_step = found.step
    best = run.done.best
    if best and run.config.checkpoint.keep_best and best["step"] not in run.store.steps():
        run.done.best = None  # that checkpoint is of another run (a branch), or was lost
    if best and best.get("name", run.config.evaluation.best) != run.config.evaluation.best:
        run.done.best, run.done.stale = None, 0  # another measure is asked for now


def save(run: Run) -> None:
    """Hand a copy of the state to the writer, once per step.

    Steps that were skipped are not saved again and again, and weights that are not finite end the run: neither may
    replace a good checkpoint.
    """
    count_pending_step(run)
    done = run.done
    last_good = done.step - done.bad_in_a_row  # a skipped step leaves the weights as they were
    if run.saved_step is not None and run.saved_step >= last_good:
        return
    run.metrics.flush()
    run.store.wait()  # all processes then know how the save before went, and no two copies are in memory
    if run.store.spoiled:
        raise diverged(run, "the weights are not finite numbers")
    tensors = {
        "model": copy_tensors(run.model.state_dict()),
        "optimizer": copy_tensors(optimizer_tensors(run.optimizer)),
    }
    if run.average is not None:
        tensors["ema"] = copy_tensors(run.average.model.state_dict())
    ready = finite_on_all(run, tensors["model"])
    late = is_async(run.device)
    if not late and not ready():
        raise diverged(run, "the weights are not finite numbers")
    state = identity(run, done.step) | {"progress": asdict(done), "config": run.config.to_dict()}
    texts = {"config": run.model.config.to_dict(), "state": state}
    run.store.save(
        Snapshot(done.step, tensors, texts, ready if late else None),
        best=None if done.best is None else done.best["step"],
    )
    run.saved_step = done.step


def finite_on_all(run: Run, weights: Mapping[str, Tensor]) -> Callable[[], bool]:
    """Return a function that waits for the copies from the device, and tells if the weights of all ranks are finite.

    Where the host does not wait for the device, the writer calls it.
    """
    arrived = event_on(run.device) if run.device.type == "cuda" else None

    def ready() -> bool:
        if arrived is not None:
            arrived.synchronize()
        finite = all(bool(local(weight).isfinite().all()) for weight in weights.values())
        return all(run.team.gather(finite, run.team.saving if is_async(run.device) else run.team.group))

    return ready


@contextmanager
def data_warnings_to(run: Run) -> Iterator[None]:
    """Show warnings of softmoe.data (images that cannot be read) between progress lines."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            run.progress.report(record.getMessage())

    logger, handler = logging.getLogger("softmoe.data"), Handler(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
