"""Confidence intervals of means over seeds, by Student's t distribution."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean over `count` seeds and how far it may lie from the truth: infinitely far for one seed; count 0: exact."""

    mean: float
    half: float
    count: int

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    def __str__(self) -> str:
        """Three digits of the larger of the two numbers."""
        largest = max(abs(self.mean), self.half if self.count > 1 else 0.0)
        digits = max(0, 2 - math.floor(math.log10(largest))) if largest else 0
        mean = f"{self.mean:+.{digits}f}"
        return (
            f"{mean} ({('by formula', 'one seed')[self.count]})"
            if self.count < 2
            else f"{mean} ± {self.half:.{digits}f}"
        )


def interval(values: Sequence[float], level: float = LEVEL) -> Interval | None:
    """Of the mean of independent values; None if there is none."""
    count = len(values)
    if count < 2:
        return Interval(values[0], math.inf, 1) if count else None
    return Interval(fmean(values), t_quantile(0.5 + level / 2, count - 1) * stdev(values) / math.sqrt(count), count)


def exact(value: float) -> Interval:
    """Of a formula."""
    return Interval(value, 0.0, 0)


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> Interval | None:
    """Of a - b over the seeds that both have: equal seeds saw the same images in the same order."""
    return interval([a[seed] - b[seed] for seed in a if seed in b])


def t_quantile(probability: float, freedom: int) -> float:
    """The value below which a t variable of `freedom` degrees lies with this probability, 0.5 at least."""
    if not 0.5 <= probability < 1.0 or freedom < 1:
        raise ValueError(f"expected a probability in [0.5, 1) and freedom of 1 at least, got {probability}, {freedom}")
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _below(middle, freedom) < probability else (low, middle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _below(angle: float, freedom: int) -> float:
    """P(T < t) with t = sqrt(freedom) tan(angle): there the density is cos(angle) ** (freedom - 1), up to a factor.

    Its integral is done by parts, two powers at a time, down to that of 1 or of the cosine.
    """
    whole = 1.0 if freedom % 2 == 0 else math.pi / 2  # integral from 0 to pi / 2 of the lowest power
    part = math.sin(angle) if freedom % 2 == 0 else angle
    for power in range(2 + (freedom % 2 == 0), freedom, 2):
        part = math.cos(angle) ** (power - 1) * math.sin(angle) / power + (power - 1) / power * part
        whole *= (power - 1) / power
    return 0.5 + 0.5 * part / whole
