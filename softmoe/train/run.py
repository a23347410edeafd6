"""The objects that a running training consists of, built from its settings: data, model, optimizer, folder, ..."""

import copy
import hashlib
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from softmoe import accelerate
from softmoe.accelerate.buffers import InBackward
from softmoe.accelerate.soft import keep_logits_only
from softmoe.budget import training_flops
from softmoe.convert.foreign import from_pretrained, locate, split_options, starting_weights
from softmoe.machine import choose_device, choose_precision, event_on, make_deterministic
from softmoe.models import TwoTower, TwoTowerConfig, VisionTransformer, ViTConfig
from softmoe.moe.record import Recording
from softmoe.parallel import local, local_shard
from softmoe.parallel.reduce import is_spread
from softmoe.storage import open_saved
from softmoe.storage.pretrained import construct
from softmoe.storage.store import CheckpointStore
from softmoe.train.config import TrainConfig
from softmoe.train.data import Data, Extract, FeatureData, can_keep_features, prepare_tokenizer
from softmoe.train.distributed import Team
from softmoe.train.evaluation import Evaluator, classify, match_pairs
from softmoe.train.folder import RunFolder
from softmoe.train.health import HealthWatch
from softmoe.train.log import MetricsFile, Progress, Sink
from softmoe.train.objectives import Contrastive, Objective, balance_weights, make_objective
from softmoe.train.optim import Schedule, make_optimizer, make_schedule
from softmoe.train.preview import recomputed, remarks


class Average:
    """A copy of the model whose weights are a running mean of the model's: e = decay * e + (1 - decay) * w.

    A model that is spread over ranks cannot be copied: `twin` is then an equal model that becomes the copy.
    """

    def __init__(self, model: nn.Module, decay: float, twin: nn.Module | None = None):
        self.model = (copy.deepcopy(model) if twin is None else twin).requires_grad_(False).eval()
        self._move = get_ema_multi_avg_fn(decay)
        self._averages: list[Tensor] = [local(p.detach()) for p in self.model.parameters()]
        self._weights: list[Tensor] = [local(p.detach()) for p in model.parameters()]

    @torch.no_grad()
    def update(self) -> None:
        self._move(self._averages, self._weights, None)


@dataclass
class TrainState:
    """The progress of a run. Every checkpoint has it, so that the next line of metrics is the same after a resume."""

    step: int = 0
    loss_sum: float = 0.0
    auxiliary_sum: float = 0.0
    norm_sum: float = 0.0
    good_steps: int = 0
    """The number of steps in the three sums: those since the last line of metrics that were not skipped."""
    objective_sums: dict[str, float] = field(default_factory=dict)
    """Sums of the objective's own numbers over the same steps."""
    skipped: int = 0
    bad_in_a_row: int = 0
    device_seconds: float = 0.0
    best: dict[str, Any] | None = None
    evaluation: dict[str, Any] | None = None
    """Step and numbers of the last evaluation."""
    stale: int = 0
    """Evaluations since the best one."""
    evaluating: bool = False
    """An evaluation has begun and not ended; a run that stopped there repeats it when it resumes."""

    @classmethod
    def read(cls, said: Any) -> "TrainState":
        """Read the state from a checkpoint's state.json. ValueError for an unknown name or a value of a wrong type."""
        kinds = {
            name: (int, float) if isinstance(value, float) else (dict, type(None)) if value is None else type(value)
            for name, value in vars(cls()).items()
        }
        if not isinstance(said, dict) or said.keys() - kinds.keys():
            raise ValueError("state.json: its progress is none of a training run")
        step = said.get("step")
        for name, value in [("step", step), *said.items()]:
            whole = isinstance(value, bool) == (kinds[name] is bool)  # True is an int for Python
            kept = isinstance(value, kinds[name]) and whole
            if kinds[name] is int:  # nothing is counted more often than there were steps
                kept = kept and 0 <= value <= step
            elif isinstance(value, (int, float)):
                kept = kept and abs(value) <= sys.float_info.max
            if not kept:
                raise ValueError(f"state.json: progress.{name} cannot be {value!r:.100}")
        best, evaluation = said.get("best"), said.get("evaluation")
        compared = {"value": best.get("value"), "loss": best.get("loss", 0.0)} if best is not None else {}
        if best is not None and not (type(best.get("step")) is int and _are_numbers(compared)):
            raise ValueError("state.json: progress.best has no step and value, or a loss that is no number")
        if evaluation is not None and not _are_numbers(evaluation.get("numbers")):
            raise ValueError("state.json: progress.evaluation has no numbers")
        if not _are_numbers(said.get("objective_sums", {})):
            raise ValueError("state.json: progress.objective_sums holds other things than numbers")
        return cls(**said)


def _are_numbers(said: Any) -> bool:
    return isinstance(said, dict) and all(type(value) in (int, float) for value in said.values())


class Pending:
    """The numbers of a step that are being copied to the host.

    They are loss, balance losses, norm of the gradient, and the objective's own by name.
    """

    def __init__(self, step: int, names: list[str], values: Tensor):
        self.step, self.names = step, names
        self._values, self._arrived = values.detach(), None
        if values.device.type == "cuda":
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values = host.copy_(values.detach(), non_blocking=True)
            self._arrived = event_on(values.device)

    def read(self) -> list[float]:
        """Return the numbers, waiting for the copy if need be."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.tolist()


@dataclass
class Run:
    config: TrainConfig
    folder: RunFolder
    data: Data
    model: VisionTransformer | TwoTower
    forward: nn.Module
    """The model, or its compiled form; same weights."""
    average: Average | None
    optimizer: torch.optim.Optimizer
    in_backward: InBackward | None
    """Updates parameters during the backward pass, if the config asks for it."""
    acceleration: accelerate.Report
    """The accelerations of the model, on which the last digits of all numbers depend."""
    schedule: Schedule
    objective: Objective
    evaluators: Mapping[str, Evaluator]
    device: torch.device
    autocast: torch.dtype | None
    recording: Recording
    store: CheckpointStore
    metrics: MetricsFile
    progress: Progress
    flops_per_image: int
    team: Team = field(default_factory=Team)
    sinks: list[Sink] = field(default_factory=list)
    done: TrainState = field(default_factory=TrainState)
    watch: HealthWatch = field(default_factory=HealthWatch)
    saved_step: int | None = None
    pending: Pending | None = None
    """The numbers of the last step, if they were not read yet."""
    loss: float = math.nan
    """The loss of the last step whose numbers were read."""
    bad_steps: list[tuple[int, float]] = field(default_factory=list)
    """Steps that were skipped, with their losses, until they are reported."""

    def totals(self) -> dict[str, float]:
        """Return what training has cost until now, the axes of the paper's figures."""
        images = self.done.step * self.config.data.batch_size
        seconds = round(self.done.device_seconds, 3)
        return {"images": images, "flops": images * self.flops_per_image, "device_seconds": seconds}

    def facts(self) -> dict[str, Any]:
        """Return what must be the same when the run resumes: the data, and the precision of products."""
        exact = self.config.precision == "exact" and self.device.type == "cuda"
        precision = "exact" if exact else "float32" if self.autocast is None else "bfloat16"
        return self.data.facts() | {"precision": precision}

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers of the last evaluation; empty if there was none."""
        return {} if self.done.evaluation is None else self.done.evaluation["numbers"]

    def problems(self) -> list[str]:
        """Return sentences about what a run that has ended could not save."""
        found, step, newest = [], self.done.step, self.store.last_good
        kept = "there is no checkpoint" if newest is None else f"the newest checkpoint is of step {newest}"
        if newest != step and self.done.bad_in_a_row:
            found.append(
                f"the last {self.done.bad_in_a_row} steps gave no finite loss or gradient and were skipped, so step "
                f"{step} is not saved; {kept}"
            )
        elif newest != step:
            again = "starts again" if newest is None else "continues from it"
            found.append(f"step {step} could not be saved; {kept}. Make room, and the same command {again}")
        if self.metrics.waiting:
            found.append(f"{len(self.metrics.waiting)} lines of {self.metrics.path} could not be written")
        return found

    def close(self) -> None:
        self.store.wait()
        self.metrics.write_waiting()
        self.progress.close()
        for sink in self.sinks:
            sink.close()


def build(
    config: TrainConfig,
    folder: RunFolder,
    objective: Objective | None = None,
    evaluators: Mapping[str, Evaluator] | None = None,
    team: Team | None = None,
    extract: Extract | None = None,
) -> Run:
    """Build a new run from the settings alone."""
    team = team or Team()
    progress = Progress(config.log.seconds, quiet=config.log.quiet or not team.leads, stream=team.stream)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if config.deterministic:
        make_deterministic()
    device = choose_device(config.device, team.local_rank)
    autocast = choose_precision(config.precision, device, progress.report)
    ours = objective is None and evaluators is None  # ours read captions only if there is a text tower
    data = Data.open(config, team.world, team.rank, captions=config.text.size is not None or not ours, device=device)
    if config.text.size is not None:
        data = replace(data, tokenizer=prepare_tokenizer(config, folder.path, data.train, team))
    shape = shape_of(config, data)
    team.check(config, shape.image if isinstance(shape, TwoTowerConfig) else shape)
    make = partial(build_model, config, shape, device)
    model = team.spread(make, autocast, config.compile)
    twin = team.spread(make, autocast) if team.world > 1 and config.ema is not None else None
    if config.model.weights is not None:  # after the model is spread, since the weights that are read are whole
        classes = () if isinstance(model, TwoTower) else tuple(data.train.classes)
        anew = starts_anew(config.model.weights, config.model.new_head, classes, config.model.head_blocks)
        if classes and not progress.quiet:
            kept = "the head is kept: its classes are the data's (--new-head True starts it anew)"
            progress.report(f"the head starts anew: {anew}" if anew else kept)
        for each in filter(None, (model, twin)):
            tower = each.image if isinstance(each, TwoTower) else each
            start_from(tower, config.model.weights, new_head=bool(anew))
    if isinstance(model, TwoTower) and config.model.locked:
        model.lock_image_tower()
        if extract is not None and team.world == 1 and can_keep_features(config, len(data.train)):
            data = FeatureData.of(data, model.image, extract)
    if config.activation_gb is not None and isinstance(model, VisionTransformer):
        again = recomputed(config, model.config, 4 if autocast is None else 2, team.world)
        model.encoder.recomputed = again
        progress.report(
            f"to keep activations within {config.activation_gb:g} GB, {len(again)} of {model.config.depth} blocks are "
            f"computed twice{': ' if again else ''}{', '.join(map(str, again))}"
        )
    average = None if config.ema is None else Average(model, config.ema, twin)  # a copy, before any hook
    recording = Recording(model)  # before compiling, which looks at the hooks
    optimizer = make_optimizer(model, config.optim, locked=config.model.locked, adapters=config.model.adapters)
    learned = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    report = accelerate.apply(model, optimizer)
    if config.keep_logits_only:
        keep_logits_only(model)
    if not progress.quiet:
        progress.report(report.summary())
    for remark in remarks(config, shape.image if isinstance(shape, TwoTowerConfig) else shape, data.train):
        progress.report(remark)
    objective = objective or default_objective(config, data, device)
    return Run(
        config=config,
        folder=folder,
        data=data,
        model=model,
        forward=torch.compile(model) if config.compile and team.world == 1 else model,  # pyright: ignore[reportArgumentType]
        average=average,
        optimizer=optimizer,
        in_backward=InBackward(optimizer) if config.optim.in_backward else None,
        acceleration=report,
        schedule=make_schedule(config.schedule, config.steps),
        objective=objective,
        evaluators=evaluators or {"val": default_evaluator(config, objective)},
        device=device,
        autocast=autocast,
        recording=recording,
        store=CheckpointStore(folder.checkpoints, config.checkpoint, progress.report, team.group, team.saving),
        metrics=MetricsFile(folder.metrics if team.leads else None),
        progress=progress,
        flops_per_image=training_flops(shape, learned, cached=isinstance(data, FeatureData)),
        team=team,
    )


def shape_of(config: TrainConfig, data: Data) -> ViTConfig | TwoTowerConfig:
    """Return the configuration of the model: an image tower, and with a tokenizer a text tower too."""
    size, c, classes = config.data.transform.image_size, config.model, tuple(data.train.classes)
    if data.tokenizer is not None:
        return config.text.resolve(c.resolve(None, size), data.tokenizer.size, data.tokenizer.end)
    if c.weights is not None and c.head_blocks is None and not starts_anew(c.weights, c.new_head, classes):
        c = replace(c, head_blocks=from_pretrained(c.weights, "meta").config.head_blocks)  # those of the kept head
    return c.resolve(len(classes) or None, size)


def default_objective(config: TrainConfig, data: Data, device: torch.device) -> Objective:
    if data.tokenizer is not None:
        return Contrastive(config.objective, data.tokenizer, config.text.length)
    return make_objective(config.objective, balance_weights(data.train, config.objective.balance, device))


def default_evaluator(config: TrainConfig, objective: Objective) -> Evaluator:
    if isinstance(objective, Contrastive):
        return partial(match_pairs, objective=objective)
    return partial(classify, loss=config.objective.loss)


def build_model(
    config: TrainConfig, shape: ViTConfig | TwoTowerConfig, device: torch.device
) -> VisionTransformer | TwoTower:
    """Build a new model, the same for the same seed whatever was drawn before."""
    torch.manual_seed(random_seed(config.seed, "model"))
    model = construct(shape).to(device)
    model.set_grad_checkpointing(config.gradient_checkpointing)
    return model


def random_seed(*parts: Any) -> int:
    """Return a seed made from any values. Each step draws from (seed, step) alone, so a resumed run draws the same."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def starts_anew(weights: str, new_head: bool | None, classes: tuple, head_blocks: tuple | None = None) -> str:
    """Return why the head starts anew; nothing if it is kept, on request or because it was saved for these classes."""
    if new_head is not None:
        return "--new-head True" if new_head else ""
    saved = open_saved(weights) if locate(split_options(weights)[0]) is None else None  # None: others' weights
    if saved is None or not saved.classes or saved.classes != classes:
        return "it was not saved for just the classes of the data"
    return "" if head_blocks in (None, saved.config.head_blocks) else "it was saved for other --head-blocks"


@torch.no_grad()
def start_from(model: VisionTransformer, weights: str | Path, *, new_head: bool = True) -> None:
    """Copy the weights of a saved model into `model`, which may be spread over processes."""
    mine = model.state_dict()
    state = starting_weights(model, weights, new_head=new_head)
    parts = {name: v if is_spread(v) else local_shard(v, mine[name]) for name, v in state.items()}
    model.load_state_dict(parts)
