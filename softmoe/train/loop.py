"""The loop: build -> resume -> step -> log -> evaluate -> save. One for every task; a task is an objective given to it.

A run is a pure function of its settings: weights, order of data and random numbers depend on (seed, step) only, so a
run that was killed anywhere and started again ends with the same bits as one that was not.
"""

import math
import time
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from softmoe.budget import cost
from softmoe.models import VisionTransformer
from softmoe.train.checkpoint import CheckpointStore, Snapshot, copy_tensors, load_optimizer, optimizer_tensors
from softmoe.train.config import TrainConfig
from softmoe.train.evaluation import Evaluator, classify
from softmoe.train.files import write_json
from softmoe.train.folder import RunFolder, differences
from softmoe.train.health import HealthWatch, model_health
from softmoe.train.logging import MetricsFile, Progress, Sink, progress_line
from softmoe.train.objectives import Objective, make_objective
from softmoe.train.optim import clip_by_global_norm, gradients, make_optimizer, set_learning_rate
from softmoe.train.parts import (
    Average,
    Data,
    build_model,
    choose_device,
    choose_precision,
    random_seed,
    split_batch,
    to_device,
)
from softmoe.train.peak import peak_flops
from softmoe.train.schedule import Schedule, make_schedule
from softmoe.train.signals import StopRequest
from softmoe.train.sinks import make_sinks
from softmoe.train.strict import flatten
from softmoe.train.tap import RoutingTap


class Diverged(ValueError):
    """Loss or gradient were not finite for too many steps in a row."""


@dataclass
class Progressed:
    """What a run has done so far, kept in every checkpoint, so the next line of metrics is the same after a resume."""

    step: int = 0
    loss_sum: float = 0.0
    auxiliary_sum: float = 0.0
    norm_sum: float = 0.0
    good_steps: int = 0
    """Steps in the three sums: those since the last line of metrics that were not skipped."""
    skipped: int = 0
    bad_in_a_row: int = 0
    device_seconds: float = 0.0
    best: dict[str, Any] | None = None


@dataclass(frozen=True)
class Result:
    """How a run ended. `signal` is the number of the signal that stopped it, or None if it finished."""

    folder: RunFolder
    step: int
    numbers: dict[str, float]
    signal: int | None = None


@dataclass
class Run:
    """Everything the loop works with."""

    config: TrainConfig
    folder: RunFolder
    data: Data
    model: VisionTransformer
    forward: nn.Module
    """The model, or its compiled form; same weights."""
    average: Average | None
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    objective: Objective
    evaluators: Mapping[str, Evaluator]
    device: torch.device
    autocast: torch.dtype | None
    tap: RoutingTap
    store: CheckpointStore
    metrics: MetricsFile
    progress: Progress
    sinks: list[Sink]
    flops_per_image: int
    done: Progressed = field(default_factory=Progressed)
    watch: HealthWatch = field(default_factory=HealthWatch)
    numbers: dict[str, float] = field(default_factory=dict)
    saved_step: int | None = None


def train(
    config: TrainConfig,
    *,
    objective: Objective | None = None,
    evaluators: Mapping[str, Evaluator] | None = None,
) -> Result:
    """Train, from the start or from the newest checkpoint in the run's folder, until the last step or a signal.

    `evaluators` maps the first part of a number's name to a function of model and validation batches; the default is
    {"val": accuracy and loss}.
    """
    config.check()
    folder = RunFolder.of(config)
    with ExitStack() as stack:
        stack.enter_context(folder.locked())
        run = build(config, folder, objective, evaluators)
        stack.callback(close, run)
        resume(run)
        stop = stack.enter_context(StopRequest())
        batches = run.data.loader.batches(run.done.step)
        stack.callback(getattr(batches, "close", nullcontext))
        clock = Clock(run.done.step)
        while run.done.step < config.steps and stop.signal is None:
            start = time.perf_counter()
            batch = to_device(next(batches), run.device)
            log_now = (run.done.step + 1) % config.log.every == 0 or run.done.step + 1 == config.steps
            loss, rate = train_step(run, batch, keep_routing=log_now and config.log.health)
            run.done.device_seconds += time.perf_counter() - start
            after_step(run, clock, loss, rate, log_now)
        if stop.signal is not None:
            save(run)
    return Result(folder, run.done.step, run.numbers, None if stop.signal is None else int(stop.signal))


def build(
    config: TrainConfig,
    folder: RunFolder,
    objective: Objective | None,
    evaluators: Mapping[str, Evaluator] | None,
) -> Run:
    progress = Progress(config.steps, config.log.seconds, quiet=config.log.quiet)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = choose_device(config.device)
    autocast = choose_precision(config.precision, device, progress.report)
    data = Data.open(config)
    shape = config.model.resolve(len(data.train.classes), config.data.transform.image_size)
    flops_per_image = cost(shape).train_flops
    model = build_model(config, shape, device)
    tap = RoutingTap(model)
    return Run(
        config=config,
        folder=folder,
        data=data,
        model=model,
        forward=torch.compile(model) if config.compile else model,  # pyright: ignore[reportArgumentType]
        average=None if config.ema is None else Average(model, config.ema),
        optimizer=make_optimizer(model, config.optim),
        schedule=make_schedule(config.schedule, config.steps),
        objective=objective or make_objective(config.objective),
        evaluators=evaluators or {"val": lambda m, batches: classify(m, batches, config.objective.loss)},
        device=device,
        autocast=autocast,
        tap=tap,
        store=CheckpointStore(folder.checkpoints, config.checkpoint, progress.report),
        metrics=MetricsFile(folder.metrics),
        progress=progress,
        sinks=make_sinks(config, folder.path),
        flops_per_image=flops_per_image,
    )


def close(run: Run) -> None:
    run.store.wait()
    run.progress.close()
    for sink in run.sinks:
        sink.close()


def resume(run: Run) -> None:
    """Continue from the newest whole checkpoint, or begin. ValueError if the folder holds another run."""
    stored = run.folder.stored()
    snapshot = run.store.latest()
    step = snapshot.step if snapshot else 0
    facts = run.data.facts()
    if stored is not None:
        changed = differences(stored[0], run.config, step)
        changed += [
            f"{key}: {value} -> {facts.get(key)}" for key, value in stored[1].items() if facts.get(key) != value
        ]
        if changed:
            lines = "\n  ".join(changed)
            raise ValueError(
                f"{run.folder.path} holds a run of another configuration:\n  {lines}\n"
                "use another run_name, or remove the folder to start again"
            )
    run.folder.begin(run.config, facts)
    if snapshot is not None:
        restore(run, snapshot)
        run.progress.report(f"resuming {run.folder.path} at step {step} of {run.config.steps}")
    run.metrics.rewind(step)


def restore(run: Run, snapshot: Snapshot) -> None:
    run.model.load_state_dict(snapshot.tensors["model"])
    load_optimizer(run.optimizer, snapshot.tensors["optimizer"])
    if run.average is not None:
        run.average.model.load_state_dict(snapshot.tensors["ema"])
    run.done = Progressed(**snapshot.texts["state"]["progress"])
    run.saved_step = snapshot.step


def train_step(run: Run, batch: Any, *, keep_routing: bool = False) -> tuple[float, float]:
    """One update, or none if loss or gradient are not finite. Returns the loss and the learning rate."""
    done, config = run.done, run.config
    rate = run.schedule(done.step)
    set_learning_rate(run.optimizer, rate)
    torch.manual_seed(random_seed(config.seed, "step", done.step))
    run.model.train()
    run.optimizer.zero_grad(set_to_none=True)
    loss, auxiliary = forward_backward(run, batch)
    norm = clip_by_global_norm(gradients(run.optimizer), config.optim.clip_norm)
    loss_value, auxiliary_value, norm_value = torch.stack([loss, auxiliary, norm]).tolist()  # the one wait per step
    done.step += 1
    if math.isfinite(loss_value) and math.isfinite(norm_value):
        run.optimizer.step()
        if run.average is not None:
            run.average.update()
        done.loss_sum += loss_value
        done.auxiliary_sum += auxiliary_value
        done.norm_sum += norm_value
        done.good_steps += 1
        done.bad_in_a_row = 0
    else:
        done.skipped += 1
        done.bad_in_a_row += 1
    if not keep_routing:
        run.tap.clear()
    return loss_value, rate


def forward_backward(run: Run, batch: Any) -> tuple[Tensor, Tensor]:
    """Gradients of the whole batch, part by part. Returns its loss (balance losses included) and the balance losses."""
    parts = split_batch(batch, run.config.accumulate)
    losses, auxiliaries = [], []
    for part in parts:
        run.tap.clear()
        with run.tap, autocast(run):
            loss, _ = run.objective(run.forward, part)
        auxiliary = run.tap.auxiliary_loss()
        if auxiliary is not None:
            auxiliary = run.config.objective.auxiliary_weight * auxiliary
            loss = loss + auxiliary
        (loss / len(parts)).backward()
        losses.append(loss.detach())
        auxiliaries.append(torch.zeros_like(losses[-1]) if auxiliary is None else auxiliary.detach())
    return torch.stack(losses).mean(), torch.stack(auxiliaries).mean()


def autocast(run: Run) -> Any:
    return nullcontext() if run.autocast is None else torch.autocast(run.device.type, dtype=run.autocast)


class Clock:
    """Images per second and time left, from the steps of this process only."""

    def __init__(self, step: int):
        self.step, self.time = step, time.perf_counter()
        self.speed = float("nan")

    def steps_per_second(self, step: int) -> float:
        """Mean since the last call with at least half a second in between."""
        now = time.perf_counter()
        if now - self.time > 0.5 or not math.isfinite(self.speed):
            self.speed = (step - self.step) / max(now - self.time, 1e-9)
            self.step, self.time = step, now
        return self.speed

    def skip(self, seconds: float) -> None:
        """Evaluations and saves are not part of the speed."""
        self.time += seconds


def after_step(run: Run, clock: Clock, loss: float, rate: float, log_now: bool) -> None:
    """Stop a diverged run; log, evaluate and save where it is time to."""
    config, done = run.config, run.done
    last = done.step == config.steps
    if run.progress.due() or last:
        show_progress(run, clock, loss, rate)
    if done.bad_in_a_row:
        report_bad_step(run, loss)
    if log_now:
        log(run, rate)
    begun = time.perf_counter()
    every = config.evaluation.every
    improved = evaluate(run) if last or (every and done.step % every == 0) else False
    if last or done.step % config.checkpoint.every == 0 or (improved and config.checkpoint.keep_best):
        save(run)
    clock.skip(time.perf_counter() - begun)


def show_progress(run: Run, clock: Clock, loss: float, rate: float) -> None:
    steps_per_second = clock.steps_per_second(run.done.step)
    images_per_second = steps_per_second * run.config.data.batch_size
    share = images_per_second * run.flops_per_image / peak_flops(run.device, run.autocast)
    left = (run.config.steps - run.done.step) / max(steps_per_second, 1e-9)
    line = progress_line(run.done.step, run.config.steps, loss, rate, images_per_second, share, left)
    if not run.config.log.quiet:
        run.progress.show(line)


def report_bad_step(run: Run, loss: float) -> None:
    done = run.done
    run.progress.report(f"step {done.step}: loss {loss} or its gradient is not finite; the step is skipped")
    if done.bad_in_a_row < run.config.max_bad_steps:
        return
    run.store.wait()
    good = run.store.last_good
    kept = "there is no checkpoint yet" if good is None else f"the last good checkpoint is {run.store.path(good)}"
    raise Diverged(
        f"stopped at step {done.step}: {done.bad_in_a_row} steps in a row gave no finite loss and gradient; {kept}. "
        "Lower schedule.peak, lengthen schedule.warmup, set optim.clip_norm to 1, or use precision float32"
    )


def log(run: Run, rate: float) -> None:
    """One line of metrics: means since the line before, totals since the start."""
    done = run.done
    images = done.step * run.config.data.batch_size
    count = max(done.good_steps, 1)
    mean = (lambda total: total / count) if done.good_steps else (lambda total: math.nan)
    record: dict[str, Any] = {
        "step": done.step,
        "loss": mean(done.loss_sum),
        "auxiliary_loss": mean(done.auxiliary_sum),
        "grad_norm": mean(done.norm_sum),
        "learning_rate": rate,
        "skipped_steps": done.skipped,
        "images": images,
        "flops": images * run.flops_per_image,
        "device_seconds": round(done.device_seconds, 3),
    }
    if run.tap.routings:
        health = model_health(run.tap.routers, run.tap.routings)
        run.tap.clear()
        record["routers"] = health
        for warning in run.watch.warnings(health):
            run.progress.report(f"step {done.step}: {warning}")
    write_metrics(run, record)
    done.loss_sum = done.auxiliary_sum = done.norm_sum = 0.0
    done.good_steps = 0


def write_metrics(run: Run, record: dict[str, Any]) -> None:
    problem = run.metrics.write(record)
    if problem:
        run.progress.report(f"could not write {run.metrics.path}: {problem}; its lines wait in memory")
    numbers = {key: float(value) for key, value in flatten(record).items() if key != "step"}
    for sink in run.sinks:
        sink.write(run.done.step, numbers)


def evaluate(run: Run) -> bool:
    """Run the evaluators on the average of the weights if there is one. True if this is the best step so far."""
    done = run.done
    model = run.model if run.average is None else run.average.model
    model.eval()
    numbers: dict[str, float] = {}
    for name, evaluator in run.evaluators.items():
        with autocast(run), torch.no_grad():
            found = evaluator(model, run.data.validation())
        numbers |= {f"{name}/{key}": value for key, value in found.items()}
    run.numbers = numbers
    images = done.step * run.config.data.batch_size
    totals = {"flops": images * run.flops_per_image, "device_seconds": round(done.device_seconds, 3)}
    write_metrics(run, {"step": done.step, **numbers, **totals})
    shown = ", ".join(f"{name} {value:.4f}" for name, value in numbers.items())
    if not run.config.log.quiet:
        run.progress.report(f"step {done.step}: {shown}")
    key = run.config.evaluation.best
    if key not in numbers:
        raise ValueError(f"evaluation.best is {key!r}, but the evaluators give: {', '.join(numbers)}")
    improved = done.best is None or numbers[key] > done.best["value"]
    if improved:
        done.best = {"step": done.step, "name": key, "value": numbers[key]}
    write_json(run.folder.evaluation, {"step": done.step, "numbers": numbers, "best": done.best})
    return improved


def save(run: Run) -> None:
    """Hand a copy of the state to the writer."""
    done = run.done
    if run.saved_step == done.step:
        return
    run.metrics.flush()
    tensors = {
        "model": copy_tensors(run.model.state_dict()),
        "optimizer": copy_tensors(optimizer_tensors(run.optimizer)),
    }
    if run.average is not None:
        tensors["ema"] = copy_tensors(run.average.model.state_dict())
    state = {
        "step": done.step,
        "seed": run.config.seed,
        "data": {"next_step": done.step, "fingerprint": run.data.train.fingerprint},
        "best": done.best,
        "progress": asdict(done),
        "config": run.config.to_dict(),
    }
    run.store.save(Snapshot(done.step, tensors, {"config": run.model.config.to_dict(), "state": state}))
    run.saved_step = done.step
