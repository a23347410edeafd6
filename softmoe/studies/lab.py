"""Fix where a study is done: the size of everything, the data, the seeds.

A study asks it for settings and yields cells.

    tiny    three steps of a model that is hardly one, on `shapes`: to see that everything works, for tests
    small   a transformer of width 32 that sees 57,600 images of 64 pixels: 45 seconds a run on one core
    paper   S/14 and S/16 at 224 pixels, 300,000 steps of 4,096 images, as in the paper: for --dry-run, or a data center

Departures of `small` from the paper: soft logits start with a scale of 6 (with 1 every slot is the mean token for most
of so short a run, see docs/experiments.md), a cosine instead of a root, softmax instead of sigmoid loss.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, get_args

from softmoe.data import TransformConfig
from softmoe.models import MoEConfig, ViTConfig
from softmoe.models.moe_config import LAYER_OPTIONS, option_names
from softmoe.moe import SoftConfig
from softmoe.recipes import load, pretrain
from softmoe.studies import LabOptions, ScaleName
from softmoe.studies.jobs import Job, Training, price
from softmoe.train import (
    CheckpointSection,
    DataSection,
    EvaluationSection,
    LogSection,
    ModelSection,
    ObjectiveSection,
    OptimSection,
    ScheduleSection,
    TrainConfig,
)

T = TypeVar("T")
SCALES: tuple[ScaleName, ...] = get_args(ScaleName)
GROUP = 32
"""Images that sparse routers route together: buffers of a few hundred tokens, as in the paper's groups."""
MORE = 1.2
"""Training FLOPs of dense controls, those of Soft MoE being 1: a step of small experts takes longer than they say."""


@dataclass(frozen=True)
class Cell:
    """One cell of a study's grid: a job with its labels and seed. A job may be a cell of several studies."""

    labels: dict[str, Any]
    seed: int
    job: Job


@dataclass(frozen=True)
class Lab:
    scale: ScaleName
    base: TrainConfig
    """The settings of the dense model; every run of a study is a variation of it."""
    seeds: int = 3
    experts: dict[str, Any] = field(default_factory=dict)
    """Settings of every model with experts."""
    soft: dict[str, Any] = field(default_factory=dict)
    """Settings of every learned soft router that has them."""
    transfer: str | None = None
    """Data of other classes."""
    recipe: str | None = None
    """The recipe that is studied, if it is one and not a scale."""

    def __str__(self) -> str:
        what = f"Scale {self.scale}" if self.recipe is None else f"Recipe {self.recipe}"
        return f"{what}, {self.seeds} {'seed' if self.seeds == 1 else 'seeds'}, data {self.base.data.train}"

    @property
    def image_size(self) -> int:
        size = self.base.data.transform.image_size
        assert isinstance(size, int)
        return size

    @property
    def shape(self) -> ViTConfig:
        """The dense model, without a head."""
        return self.base.model.resolve(None, self.image_size)

    @property
    def tokens(self) -> int:
        """The number of tokens of one image."""
        return self.shape.tokens

    @property
    def slots(self) -> int:
        """The number of slots of soft routers: one for each expert."""
        return self.experts.get("num_experts", self.tokens)

    def pick(self, *, tiny: T, small: T, paper: T) -> T:
        return {"tiny": tiny, "small": small, "paper": paper}[self.scale]

    def config(self, router: str = "dense", *, peak: float | None = None, **changes: Any) -> TrainConfig:
        """Return the base with this router and these settings of the model. Equal models come out as equal settings."""
        given: dict[str, Any] = (
            {} if router == "dense" else {"router": router, "num_experts": self.tokens, **self.experts}
        )
        if router in ("soft", "soft_uniform", "uniform_soft", "placed"):
            given |= {name: value for name, value in self.soft.items() if name in option_names(router)}
        if router == "uniform":  # with the same input and weight everywhere, copies of one expert would stay copies
            given["identical_init"] = False
        if router not in ("soft", "placed"):
            given.pop("slots_stay", None)
        if router in ("tokens_choice", "experts_choice"):
            given["group_size"] = min(GROUP, self.base.data.batch_size) * self.tokens
        usual = {} if router == "dense" else MoEConfig.of(router).to_dict() | {"router": None, "num_experts": None}
        set_anew = {key: value for key, value in (given | changes).items() if value != usual.get(key, self)}
        config = replace(self.base, model=self.base.model.change(**set_anew))
        return config if peak is None else replace(config, schedule=replace(config.schedule, peak=peak))

    def one_expert(self, **changes: Any) -> TrainConfig:
        """Return Soft MoE with one expert that has all slots: the control of what experts give."""
        return self.config("soft", num_experts=1, slots_per_expert=self.slots, **changes)

    def dense(self, factor: float = 1.0, **changes: Any) -> TrainConfig:
        """Return the dense model at `factor` times the rate, with MORE times the training FLOPs of Soft MoE."""
        return self.longer(self.config("dense", peak=factor * self.base.schedule.peak, **changes), **changes)

    def merged(self, **changes: Any) -> TrainConfig | None:
        """Return the dense model with tokens merged (PatchMerger) until a step costs what one of Soft MoE does.

        They are merged in the middle of the depth; where slots stay, into as many, after the block in which tokens
        become slots. None if slots are not fewer than tokens.
        """
        if self.slots >= self.tokens:
            return None
        if self.slots_stay:
            block = self.config("soft", **changes).model.resolve(None, self.image_size).last_map
            return self.longer(self.config("dense", merge=(block, self.slots), **changes), **changes)
        middle = (self.shape.depth - 1) // 2
        wanted = price(self.config("soft", **changes)).train_flops
        choices = (self.config("dense", merge=(middle, tokens), **changes) for tokens in range(1, self.tokens))
        return self.longer(min(choices, key=lambda one: abs(price(one).train_flops - wanted)), **changes)

    def longer(self, config: TrainConfig, **changes: Any) -> TrainConfig:
        """Return a model's settings with the steps at which it has MORE times the FLOPs of Soft MoE."""
        flops = [price(one).train_flops for one in (self.config("soft", **changes), config)]
        return replace(config, steps=math.ceil(MORE * config.steps * flops[0] / flops[1]))

    def controls(self, **changes: Any) -> dict[str, TrainConfig]:
        """Return what Soft MoE is shown beside, by the names of results.GIVES.

        Where slots stay, those whose tokens come back would differ in more than their name says.
        """
        # with more slots than tokens Identity has experts that would be idle, and steps that cost less
        identity = self.config("identity", num_experts=min(self.slots, self.tokens), **changes)
        found = {
            "dense": self.dense(**changes),
            "one": self.one_expert(**changes),
            "uniform_soft": self.config("uniform_soft", **changes),
            "identity": self.longer(identity, **changes) if self.slots > self.tokens else identity,
            "merged": self.merged(**changes),
        }
        left_out = ("uniform_soft", "identity") if self.slots_stay else ()
        return {method: config for method, config in found.items() if config is not None and method not in left_out}

    @property
    def slots_stay(self) -> bool:
        return bool(self.experts.get("slots_stay"))

    def combining(self) -> "Lab":
        """Return this lab with layers that combine, as the paper's do, if its recipe's slots stay."""
        return replace(self, experts=self.experts | {"slots_stay": False}) if self.slots_stay else self

    def with_slots(self, slots: int) -> "Lab":
        """Return this lab with so many slots, one for each expert."""
        return replace(self, experts=self.experts | {"num_experts": slots})

    def over_seeds(self, config: TrainConfig, **labels: Any) -> Iterator[Cell]:
        for seed in range(self.seeds):
            yield Cell(labels, seed, Training(replace(config, seed=seed)))


def wide(width: int) -> dict[str, Any]:
    """Return the settings of a model of this width; its heads stay as many."""
    return {"width": width, "mlp_dim": 4 * width}


def make_lab(options: LabOptions) -> Lab:
    """Set up a lab. Each scale has default data; `paper`'s is a stand-in to count FLOPs with."""
    o, scale = options, options.scale
    if o.recipe is not None:
        lab = recipe_lab(o.recipe)
    else:
        base = {"tiny": tiny_base, "small": small_base, "paper": paper_base}[scale]()
        lab = Lab(scale, base, 3 if scale == "small" else 1, soft={} if scale == "paper" else {"scale_init": 6.0})
    base = lab.base if o.data is None else replace(lab.base, data=replace(lab.base.data, train=o.data))
    base = base if o.steps is None else with_steps(base, o.steps)
    lab = replace(lab, base=base, seeds=o.seeds or lab.seeds, transfer=o.transfer)
    return lab if o.slots is None else lab.with_slots(o.slots)


def recipe_lab(recipe: str) -> Lab:
    """Set up a lab around a recipe's model: its dense twin is the base, studies vary its experts and router."""
    config = load(recipe)
    moe = config.model.resolve(None, config.data.transform.image_size).moe
    if moe is None or not isinstance(moe.router, SoftConfig):
        raise ValueError(f"the recipe {recipe} has no soft experts for a study to take apart")
    if moe.router.slots_per_expert != 1:
        raise ValueError(f"studies of a recipe need one slot per expert, {recipe} has {moe.router.slots_per_expert}")
    model = config.model.change(router="dense", num_experts=None, **dict.fromkeys(LAYER_OPTIONS))
    base = replace(
        config,
        model=model,
        data=replace(config.data, workers=0),
        evaluation=replace(config.evaluation, every=None),
        log=replace(config.log, quiet=True),
        threads=1,
    )
    experts = {"num_experts": moe.num_experts} | {name: getattr(moe, name) for name in LAYER_OPTIONS}
    soft = {name: value for name, value in vars(moe.router).items() if name not in ("num_experts", "slots_per_expert")}
    return Lab("small", base, 3, experts, soft, recipe=recipe)


def with_steps(config: TrainConfig, steps: int) -> TrainConfig:
    """Set the steps: a tenth of them to warm up, two checkpoints, twelve lines in the log."""
    return replace(
        config,
        steps=steps,
        schedule=replace(config.schedule, warmup=steps // 10),
        checkpoint=replace(config.checkpoint, every=max(1, steps // 2)),
        log=replace(config.log, every=max(1, steps // 12)),
    )


def small_base() -> TrainConfig:
    config = TrainConfig(
        model=ModelSection(name="vit_ti16", width=32, depth=4, heads=4, mlp_dim=128),
        data=DataSection(
            train="shapes?size=64",
            batch_size=64,
            workers=0,
            transform=TransformConfig(image_size=64, crop="pad_crop", flip=True),
        ),
        optim=OptimSection(head_decay=0.05, kernel_decay=0.05, scale_decay=0.0, clip_norm=1.0),
        schedule=ScheduleSection(kind="cosine", peak=6e-3),
        objective=ObjectiveSection(label_smoothing=0.1),
        evaluation=EvaluationSection(every=None),
        checkpoint=CheckpointSection(keep_last=1, keep_best=False),
        log=LogSection(quiet=True),
        threads=1,
    )
    return with_steps(config, 900)


def tiny_base() -> TrainConfig:
    config = small_base()
    return replace(
        config,
        steps=3,
        model=replace(config.model, name="vit_ti8", width=16, depth=2, heads=2, mlp_dim=32),
        data=replace(
            config.data,
            train="shapes?size=32&length=1024",
            batch_size=8,
            transform=TransformConfig(image_size=32, crop="resize"),
        ),
        schedule=replace(config.schedule, warmup=1),
        evaluation=EvaluationSection(every=None, examples=16),
        log=LogSection(every=1, quiet=True),
    )


def paper_base() -> TrainConfig:
    config = pretrain.recipe()
    return replace(
        config,
        model=ModelSection(name="vit_s14"),
        evaluation=replace(config.evaluation, every=10_000),
        log=replace(config.log, quiet=True),
    )
