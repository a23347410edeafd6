"""The settings of a training run as frozen dataclasses. A recipe is a function that returns a TrainConfig."""

import math
import re
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from softmoe.data import TransformConfig
from softmoe.machine import MOST_AT_ONCE, Precision
from softmoe.storage.checkpoint_section import CheckpointSection
from softmoe.storage.settings import from_dict
from softmoe.train.model_section import ModelSection, TextSection

_RUN_NAME = re.compile(r"[^\W_][\w.\-]*")


@dataclass(frozen=True)
class DataSection:
    train: str = "shapes"
    """Training images: shapes, characters, folder:PATH, wds:PATTERN, pairs:PATH, hf:NAME, idx:PATH, digits."""
    val: str | None = None
    """Source of the validation images; None is the same source."""
    train_split: str = "train"
    val_split: str = "val"
    batch_size: int = 64
    eval_batch_size: int = 256
    workers: int | Literal["auto"] = "auto"
    """Processes that read and transform images; 0 does it in the training process. auto is 1 for training on a CPU, and
    for a GPU one per core but one, at most 16."""
    prefetch: int = 4
    """Batches that each worker prepares ahead; without workers, those of `shapes` that are drawn together."""
    buffer_mb: int = 8192
    """The most MiB of batches that may wait; if need be fewer are prepared ahead, by fewer workers."""
    max_broken: float = 0.05
    """The share of unreadable images above which the run stops."""
    mix_after: float | None = None
    """Epochs. A run that is longer mixes its images by mixup 0.2 and cutmix 1.0, unless either is set; None never."""
    transform: TransformConfig = field(default_factory=TransformConfig)


@dataclass(frozen=True)
class OptimSection:
    name: Literal["adamw", "sgd", "muon"] = "adamw"
    """muon: Muon for the matrices of attention, MLPs and experts, AdamW for all else (patches, routers, head)."""
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    momentum: float = 0.9
    """The momentum of SGD."""
    expert_momentum: float = 0.95
    """Muon's momentum for the matrices of experts; that of all others is 0.95. A lower value keeps experts from
    memorizing images that are seen often."""
    head_decay: float = 0.03
    """Weight decay of the head's matrix (the paper: 3.0 on JFT-4B)."""
    kernel_decay: float = 0.03
    """Weight decay of all other matrices: patches, attention, MLPs, experts, sparse routers."""
    decay_epochs: float | None = None
    """Epochs in which decay, at the highest rate, brings a matrix to about a third of itself. Where it is given the
    number of training images decides kernel_decay, 0.5 at most."""
    scale_decay: float = 0.03
    """Weight decay of the Soft routers' scale. Slot vectors, biases, norms and positions have none of these three."""
    decay_patterns: tuple[tuple[str, float], ...] = ()
    """(pattern, decay) pairs that come first, by regular expression on the parameter's name."""
    lr_patterns: tuple[tuple[str, float], ...] = ()
    """(pattern, factor) pairs: the learning rate of the parameters whose name matches is multiplied; 0 freezes them."""
    freeze: float = 0.0
    """The share of the blocks, from the first one up, that stay as they are, and with them all that comes before; with
    1 only what follows the blocks learns. Less is computed: nothing goes backward below the first one that learns."""
    layer_decay: float | None = None
    """Layer-wise decay: the learning rate of a block over that of the block above it; None is the same for all."""
    clip_norm: float | None = 1.0
    """Largest global norm of the gradient; None does not clip."""
    states: Literal["float32", "bfloat16"] = "float32"
    """What AdamW's moments are kept in; bfloat16 takes half of their memory."""
    in_backward: bool = False
    """Update parameters during the backward pass, so that not all gradients are in memory at once. Needs clip_norm None
    and accumulate 1: the norm of the whole gradient is known only after the pass."""


@dataclass(frozen=True)
class ScheduleSection:
    kind: Literal["rsqrt", "linear", "cosine", "constant"] = "rsqrt"
    peak: float = 1e-3
    """The highest learning rate, reached after the warm-up."""
    warmup: int = 10_000
    timescale: int = 10_000
    """Timescale of rsqrt: steps after the warm-up until the rate has fallen by the root of 2."""
    cooldown: int = 0
    """The number of last steps in which the rate falls linearly to zero."""
    end: float = 0.0
    """The last value of linear and cosine."""
    decay_steps: int | None = None
    """Step at which linear and cosine reach their end; None is the length of the run."""


@dataclass(frozen=True)
class ObjectiveSection:
    loss: Literal["softmax", "sigmoid"] = "softmax"
    """Cross-entropy of one class of many, or of each class by itself (summed over classes, as in the paper). With a
    text tower: of one caption of many (CLIP), or of each pair by itself (SigLIP, as in the paper)."""
    label_smoothing: float = 0.0
    balance: float = 0.0
    """Weight images by (mean number of images of a class / that of their class) to this power: 1 makes every class
    count the same, however few images it has; 0.5 is half way."""
    auxiliary_weight: float = 1.0
    """Factor of the balance losses of sparse routers."""


@dataclass(frozen=True)
class EvaluationSection:
    every: int | None = 1000
    """Steps between evaluations; there is always one at the end. None: only at the end."""
    examples: int | None = None
    """Evaluate on this many validation images only."""
    best: str = "val/top1"
    """The number whose largest value marks the best checkpoint; of equal ones it is that of the lower loss."""
    patience: int | None = None
    """Stop early after so many evaluations in a row without a better one; None never stops early."""
    fewshot: str | None = None
    """A source of other classes: each evaluation also gives the 10-shot accuracy of the features there."""


@dataclass(frozen=True)
class LogSection:
    every: int = 50
    """Steps between lines of metrics.jsonl."""
    seconds: float = 10.0
    """Time between progress lines in a log file."""
    health: bool = True
    """Include the health of each router in every line of metrics.jsonl."""
    quiet: bool = False
    tensorboard: bool = False
    wandb: str | None = None
    """Name of a Weights & Biases project."""


@dataclass(frozen=True)
class ParallelSection:
    """The way in which processes that torchrun started share the model. The batch is always split over all of them."""

    expert: int = 1
    """So many processes own the experts together and exchange slots; a divisor of the number of experts."""
    shard: int = 1
    """So many processes keep all other weights together (FSDP); larger than `expert` cuts the experts too."""
    timeout: float = 600.0
    """Seconds after which a process gives up waiting for the others."""


@dataclass(frozen=True)
class TrainConfig:
    """Holds all settings of a run."""

    run_name: str = "run"
    """The run is in the folder RUNS/RUN_NAME; the same command resumes it from there."""
    runs: str = "runs"
    steps: int = 10_000
    seed: int = 0
    model: ModelSection = field(default_factory=ModelSection)
    text: TextSection = field(default_factory=TextSection)
    data: DataSection = field(default_factory=DataSection)
    optim: OptimSection = field(default_factory=OptimSection)
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    objective: ObjectiveSection = field(default_factory=ObjectiveSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    log: LogSection = field(default_factory=LogSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    precision: Precision = "auto"
    """The precision of products; weights stay float32. auto is bfloat16 on a CUDA device that has it and float32
    elsewhere; on CUDA float32 takes TF32 products, and exact does not."""
    compile: bool = False
    ema: float | None = None
    """Keep an average of the weights with this decay (0.9999) and evaluate it."""
    accumulate: int = 1
    """Split each batch into so many parts, to save memory; the gradient is that of the whole batch."""
    gradient_checkpointing: bool = False
    """Save memory by computing the inside of each block twice."""
    activation_gb: float | None = None
    """Compute as few blocks twice as keep the activations of a process within so many GB, the cheapest first."""
    keep_logits_only: bool = False
    """Save memory in Soft routers by keeping their logits and computing both softmaxes again in the backward pass."""
    max_bad_steps: int = 10
    """Stop after so many steps in a row whose loss or gradient is not finite."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    deterministic: bool = False
    """On a GPU: take algorithms that give the same bits every time, which are slower. A CPU always does."""
    threads: int | None = None
    """CPU threads; None is what torch chooses."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"model": self.model.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainConfig":
        if isinstance(values, dict) and "model" in values:
            values = values | {"model": ModelSection.from_dict(values["model"], "model")}
        return from_dict(cls, values)

    def check(self) -> None:
        """Raise ValueError for settings that cannot work together, before anything is opened or built."""
        d, s = self.data, self.schedule
        positive = {
            "steps": self.steps,
            "data.batch_size": d.batch_size,
            "data.eval_batch_size": d.eval_batch_size,
            "data.buffer_mb": d.buffer_mb,
            "data.prefetch": d.prefetch,
            "accumulate": self.accumulate,
            "max_bad_steps": self.max_bad_steps,
            "evaluation.every": self.evaluation.every,
            "evaluation.examples": self.evaluation.examples,
            "evaluation.patience": self.evaluation.patience,
            "checkpoint.every": self.checkpoint.every,
            "checkpoint.keep_last": self.checkpoint.keep_last,
            "checkpoint.keep_every": self.checkpoint.keep_every,
            "log.every": self.log.every,
            "schedule.timescale": s.timescale,
            "schedule.decay_steps": s.decay_steps,
            "threads": self.threads,
        }
        for name, value in positive.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name, value in {"data.workers": d.workers, "data.prefetch": d.prefetch, "threads": self.threads}.items():
            if isinstance(value, int) and not 0 <= value <= MOST_AT_ONCE:
                raise ValueError(f"{name} is from 0 to {MOST_AT_ONCE}, not {value}")
        self.check_numbers()
        if d.batch_size % self.accumulate:
            raise ValueError(f"accumulate must divide the batch: {d.batch_size} is not a multiple of {self.accumulate}")
        if s.warmup < 0 or s.cooldown < 0 or s.warmup + s.cooldown > self.steps:
            raise ValueError(
                f"warm-up and cooldown must fit in the run: {s.warmup} + {s.cooldown} steps of {self.steps}; "
                "set schedule.warmup and schedule.cooldown"
            )
        if self.optim.states != "float32" and self.optim.name != "adamw":
            raise ValueError(f"optim.states is for adamw, but optim.name is {self.optim.name}")
        if self.optim.in_backward and (self.optim.clip_norm is not None or self.accumulate > 1):
            raise ValueError(
                "optim.in_backward updates before the whole gradient is known: set optim.clip_norm to None and "
                f"accumulate to 1, not {self.optim.clip_norm} and {self.accumulate}"
            )
        if self.gradient_checkpointing and self.activation_gb is not None:
            raise ValueError("gradient_checkpointing computes every block twice: leave it out beside activation_gb")
        decay = self.optim.layer_decay
        if decay is not None and not 0.0 < decay <= 1.0:
            raise ValueError(f"optim.layer_decay must be above 0 and at most 1, got {decay}")
        if self.model.adapters and self.model.weights is None:
            raise ValueError("model.adapters stand beside the MLPs of a trained model: use softmoe finetune --adapters")
        if self.model.adapters and self.model.refit_head:
            raise ValueError("adapters are saved with the head they learned: leave out model.refit_head beside them")
        self.check_text()
        self.model.resolve(None, self.data.transform.image_size)  # names of models, routers and their options
        if not _RUN_NAME.fullmatch(self.run_name):
            raise ValueError(
                "run_name must be a plain folder name of letters, digits, dots, dashes and underscores that begins "
                f"with a letter or digit, got {self.run_name!r}; the folder above is `runs`"
            )

    def check_numbers(self) -> None:
        """Raise ValueError for rates, decays and factors that are negative or not finite."""
        o, s = self.optim, self.schedule
        patterns = (("decay_patterns", o.decay_patterns), ("lr_patterns", o.lr_patterns))
        not_negative = {
            "schedule.peak": s.peak,
            "schedule.end": s.end,
            "optim.head_decay": o.head_decay,
            "optim.kernel_decay": o.kernel_decay,
            "optim.scale_decay": o.scale_decay,
            "optim.eps": o.eps,
            "optim.momentum": o.momentum,
            "objective.auxiliary_weight": self.objective.auxiliary_weight,
            "objective.balance": self.objective.balance,
            "log.seconds": self.log.seconds,
            "parallel.timeout": self.parallel.timeout,
            **{f"optim.{key} of {pattern!r}": value for key, rules in patterns for pattern, value in rules},
        }
        if self.activation_gb is not None:
            not_negative["activation_gb"] = self.activation_gb
        for name, value in not_negative.items():
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"{name} must be a finite number of at least 0, got {value}")
        shares = {
            "optim.beta1": o.beta1,
            "optim.beta2": o.beta2,
            "optim.expert_momentum": o.expert_momentum,
            "ema": self.ema,
            "objective.label_smoothing": self.objective.label_smoothing,
        }
        for name, value in shares.items():
            if value is not None and not 0.0 <= value < 1.0:
                raise ValueError(f"{name} must be in [0, 1), got {value}")
        if o.clip_norm is not None and not (math.isfinite(o.clip_norm) and o.clip_norm > 0.0):
            raise ValueError(f"optim.clip_norm must be a finite number above 0, or None not to clip; got {o.clip_norm}")
        if o.decay_epochs is not None and not (math.isfinite(o.decay_epochs) and o.decay_epochs > 0.0):
            raise ValueError(f"optim.decay_epochs is a number of epochs above 0, or None; got {o.decay_epochs}")
        if self.data.mix_after is not None and not self.data.mix_after >= 0.0:
            raise ValueError(f"data.mix_after is a number of epochs, or None; got {self.data.mix_after}")
        for name, value in {"data.max_broken": self.data.max_broken, "optim.freeze": o.freeze}.items():
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name} is a share in [0, 1], got {value}")

    def check_text(self) -> None:
        """Raise ValueError for settings that need a text tower, or make no sense with one."""
        if self.text.size is None:
            if self.model.locked:
                raise ValueError("model.locked locks the image tower beside a text tower: set text.size, or use lit")
            return
        without = {
            "data.transform.mixup": self.data.transform.mixup,
            "data.transform.cutmix": self.data.transform.cutmix,
            "objective.label_smoothing": self.objective.label_smoothing,
            "objective.balance": self.objective.balance,
            "optim.freeze": self.optim.freeze,
            "optim.layer_decay": self.optim.layer_decay,
            "model.num_classes": self.model.num_classes,
            "model.refit_head": self.model.refit_head,
            "activation_gb": self.activation_gb,
        }
        for name, value in without.items():
            if value:
                raise ValueError(f"{name} is for classification, and this run has a text tower: leave it out")
        if self.data.batch_size < 2:
            raise ValueError(
                "a text tower learns from the other captions of a batch: data.batch_size must be 2 or more"
            )
