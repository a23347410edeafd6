"""Learning rates: pure functions of the step (0-based: the first update uses rate(0)). Never negative.

    warm-up      peak * t / W for t < W, so the very first update has rate 0 when there is a warm-up
    rsqrt        peak / sqrt(1 + (t - W) / timescale)
    linear       from peak at W to `end` at `decay_steps`
    cosine       the same with half a cosine
    cooldown     the last C steps go from the rate at T - C to 0 in a straight line (any kind)

T is the length of the run, W the warm-up and C the cooldown, in steps.
"""

import math
from collections.abc import Callable

from softmoe.train.config import ScheduleSection

Schedule = Callable[[int], float]


def make_schedule(config: ScheduleSection, steps: int) -> Schedule:
    """rate(step) for a run of `steps` updates; 0 from the end of a cooldown on."""
    base = _base(config, config.decay_steps or steps)
    start, cooldown = steps - config.cooldown, config.cooldown

    def rate(step: int) -> float:
        if step < config.warmup:
            return config.peak * step / config.warmup
        if cooldown and step >= start:
            return max(0.0, base(start) * (1.0 - (step - start) / cooldown))
        return max(0.0, base(step))

    return rate


def _base(config: ScheduleSection, decay_steps: int) -> Schedule:
    peak, end, warmup = config.peak, config.end, config.warmup

    def done(step: int) -> float:
        return min(1.0, (step - warmup) / max(1, decay_steps - warmup))

    return {
        "rsqrt": lambda step: peak / math.sqrt(1.0 + (step - warmup) / config.timescale),
        "linear": lambda step: end + (peak - end) * (1.0 - done(step)),
        "cosine": lambda step: end + (peak - end) * 0.5 * (1.0 + math.cos(math.pi * done(step))),
        "constant": lambda step: peak,
    }[config.kind]
