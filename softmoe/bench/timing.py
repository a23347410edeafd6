"""Time several functions fairly on a noisy machine: in turn, many times, medians."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Seconds of one call. `spread` is half the distance between the quartiles, as a share of the median."""

    median: float
    spread: float
    rounds: int


def interleave(
    functions: Mapping[str, Callable[[], object]], *, rounds: int = 9, seconds: float = 20.0
) -> dict[str, Timing]:
    """Call every function once a round, each round starting with another one, until rounds or time are used up.

    Ratios between functions of one call are comparable: they saw the same machine. At least three rounds are run.
    """
    names = list(functions)
    for name in names:
        functions[name]()  # warm-up: allocations, lazy initialization
    taken: dict[str, list[float]] = {name: [] for name in names}
    start = time.perf_counter()
    for index in range(rounds):
        for shift in range(len(names)):
            name = names[(index + shift) % len(names)]
            before = time.perf_counter()
            functions[name]()
            taken[name].append(time.perf_counter() - before)
        if index >= 2 and time.perf_counter() - start > seconds:
            break
    return {name: summarize(values) for name, values in taken.items()}


def summarize(values: list[float]) -> Timing:
    median = statistics.median(values)
    quartiles = statistics.quantiles(values, n=4) if len(values) > 2 else [min(values), median, max(values)]
    return Timing(median, (quartiles[2] - quartiles[0]) / 2 / median, len(values))
