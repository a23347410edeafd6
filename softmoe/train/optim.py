"""Parameters -> groups with their weight decay and rate; AdamW, SGD or Muon; and the learning rate of each step.

The decay of a parameter is that of the first rule its name matches, zero if none does. The rules follow the paper's
code: the head's matrix, all other matrices, and the soft routers' scale. Slot vectors (phi), biases, norms,
positions, class token and probe are in no rule.

Rates are pure functions of the step (0-based: the first update uses rate(0)), never negative:

    warm-up      peak * t / W for t < W, so the very first update has rate 0 when there is a warm-up
    rsqrt        peak / sqrt(1 + (t - W) / timescale)
    linear       from peak at W to `end` at `decay_steps`
    cosine       the same with half a cosine
    cooldown     the last C steps go from the rate at T - C to 0 in a straight line (any kind)

T is the length of the run, W the warm-up and C the cooldown, in steps.
"""

import math
import re
from collections.abc import Callable, Set
from dataclasses import replace

import torch
from torch import Tensor, nn

from softmoe.train.config import OptimSection, ScheduleSection
from softmoe.train.muon import MOMENTUM, Muon

BLOCK = re.compile(r"^encoder\.blocks\.(\d+)\.")
BELOW = re.compile(r"^(embed|positions|pre_norm)\.|^(class_token|registers)$")  # what comes before the first block
HEAD = r"^head\.weight$"
SCALE = r"router\.scale$"
KERNEL = r"(^|\.)(proj|qkv|out|fc1|fc2|router|pre_logits|projection)\.weight$|\.experts\.w[12]$"
LOCKED = (r"^image\.", 0.0)  # the image tower of two
BESIDE = re.compile(r"^(.*\.mlp)\.(router|experts|mlp)\.")
MATRIX = re.compile(
    r"(^|\.)encoder\.blocks\.\d+\."
    r"((attention|mlp|mlp\.mlp)\.(qkv|out|fc1|fc2)\.weight|(?P<expert>mlp\.experts\.w[12]))$"
)
ADAPTERS = ((r"^head\.|\.mlp\.(router|experts)\.", 1.0), (r"", 0.0))
Schedule = Callable[[int], float]


def make_optimizer(
    model: nn.Module, config: OptimSection, *, locked: bool = False, adapters: bool = False
) -> torch.optim.Optimizer:
    """Make AdamW, SGD or Muon, for the parameters that `parameter_groups` does not leave out."""
    groups = parameter_groups(model, config, locked=locked, adapters=adapters)
    if config.name == "sgd":
        return make_sgd(groups, config.momentum)
    betas = (config.beta1, config.beta2)
    if config.name == "muon":
        return Muon(groups, betas=betas, eps=config.eps)
    if config.states == "bfloat16":
        from softmoe.accelerate.optimizer import CompactAdamW

        return CompactAdamW(groups, lr=0.0, betas=betas, eps=config.eps)
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=config.eps, fused=True)


def make_sgd(groups: list[dict], momentum: float) -> torch.optim.Optimizer:
    """Make SGD; on a GPU with the fused update, which a flag on the device can tell to skip a step.

    There its momentum buffers begin at zero, so that a first step that is skipped leaves them so.
    """
    on_gpu = groups[0]["params"][0].device.type == "cuda"
    optimizer = torch.optim.SGD(groups, lr=0.0, momentum=momentum, fused=True if on_gpu else None)
    if on_gpu and momentum:
        for parameter in (p for group in groups for p in group["params"]):
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def parameter_groups(
    model: nn.Module, config: OptimSection, *, locked: bool = False, adapters: bool = False
) -> list[dict]:
    """Return a group per (decay, factor of the learning rate, Muon's momentum); a factor of 0 takes the parameter out.

    `locked` leaves the image tower of two out; `adapters` all but the head and the experts beside MLPs, and what
    lr_patterns name.
    """
    if adapters:
        config = replace(config, lr_patterns=(*config.lr_patterns, *ADAPTERS))
    if locked:
        config = replace(config, lr_patterns=(LOCKED, *config.lr_patterns))
    decay_rules = (
        *config.decay_patterns,
        (HEAD, config.head_decay),
        (SCALE, config.scale_decay),
        (KERNEL, config.kernel_decay),
    )
    names = [name for name, _ in model.named_parameters()]
    beside = {match[1] for name in names if (match := BESIDE.match(name)) and match[2] == "mlp"}
    depth = 1 + max((int(match[1]) for name in names if (match := BLOCK.match(name))), default=-1)
    groups: dict[tuple[float, float, float | None], dict] = {}
    used: set[str] = set()
    for name, parameter in model.named_parameters():
        decay, pattern = first_match(decay_rules, name, 0.0)
        factor, factor_pattern = first_match(config.lr_patterns, name, 1.0)
        factor *= 1.0 if config.layer_decay is None else config.layer_decay ** layers_above(name, depth, beside)
        if is_frozen(name, round(config.freeze * depth)):
            factor = 0.0
        used |= {pattern, factor_pattern}
        if factor == 0.0:
            parameter.requires_grad_(False)
            continue
        momentum = muon_momentum(name, config)
        muon = {} if momentum is None else {"muon": True, "momentum": momentum}
        new = {"params": [], "names": [], "weight_decay": decay, "lr_factor": factor} | muon
        group = groups.setdefault((decay, factor, momentum), new)
        group["params"].append(parameter)
        group["names"].append(name)
    for pattern, _ in (*config.decay_patterns, *config.lr_patterns):
        if pattern in used:
            continue
        if any(re.search(pattern, name) for name in names):
            raise ValueError(f"the pattern {pattern!r} is never used: earlier ones match all of its parameters")
        some = ", ".join((names[0], names[len(names) // 2], names[-1]))
        raise ValueError(f"the pattern {pattern!r} matches no parameter; names look like {some}")
    if not groups:
        raise ValueError("optim.lr_patterns freezes every parameter, so there is nothing to train")
    return list(groups.values())


def muon_momentum(name: str, config: OptimSection) -> float | None:
    """Return the momentum with which Muon steps a parameter; None if it does not."""
    match = MATRIX.search(name) if config.name == "muon" else None
    return None if match is None else config.expert_momentum if match["expert"] else MOMENTUM


def is_frozen(name: str, blocks: int) -> bool:
    """Tell if a parameter is in the first so many blocks or before them; with 0 blocks none is."""
    match = BLOCK.match(name)
    return int(match[1]) < blocks if match else blocks > 0 and BELOW.match(name) is not None


def layers_above(name: str, depth: int, beside: Set[str] = frozenset()) -> int:
    """Count the steps from the head down to a parameter: 0 after the last block, 1 in it, depth + 1 before the first.

    Experts `beside` a kept MLP are new as the head is, and learn at its rate.
    """
    new = BESIDE.match(name)
    if new and new[1] in beside and new[2] != "mlp":
        return 0
    match = BLOCK.match(name)
    return depth - int(match[1]) if match else depth + 1 if BELOW.match(name) else 0


def first_match(rules: tuple[tuple[str, float], ...], name: str, default: float) -> tuple[float, str]:
    for pattern, value in rules:
        if re.search(pattern, name):
            return value, pattern
    return default, ""


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_factor"]


def gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def make_schedule(config: ScheduleSection, steps: int) -> Schedule:
    """Return the learning rate as a function of the step, for a run of `steps` updates; 0 after a cooldown."""
    base = _before_cooldown(config, config.decay_steps or steps)
    start, cooldown = steps - config.cooldown, config.cooldown

    def rate(step: int) -> float:
        if step < config.warmup:
            return config.peak * step / config.warmup
        if cooldown and step >= start:
            return max(0.0, base(start) * (1.0 - (step - start) / cooldown))
        return max(0.0, base(step))

    return rate


def _before_cooldown(config: ScheduleSection, decay_steps: int) -> Schedule:
    peak, end, warmup = config.peak, config.end, config.warmup

    def done(step: int) -> float:
        return min(1.0, (step - warmup) / max(1, decay_steps - warmup))

    return {
        "rsqrt": lambda step: peak / math.sqrt(1.0 + (step - warmup) / config.timescale),
        "linear": lambda step: end + (peak - end) * (1.0 - done(step)),
        "cosine": lambda step: end + (peak - end) * 0.5 * (1.0 + math.cos(math.pi * done(step))),
        "constant": lambda step: peak,
    }[config.kind]
