"""Intervals over seeds against printed tables of the t distribution, and their meaning."""

import math
import random
from statistics import fmean

import pytest

from softmoe.studies.results import Interval, interval, paired, t_quantile


@pytest.mark.parametrize(
    ("probability", "freedom", "printed"),
    [
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 3, 3.182),
        (0.975, 4, 2.776),
        (0.975, 10, 2.228),
        (0.95, 2, 2.920),
        (0.95, 5, 2.015),
        (0.995, 7, 3.499),
        (0.975, 120, 1.980),
        (0.5, 3, 0.0),
    ],
)
def test_quantiles_are_those_of_the_tables(probability: float, freedom: int, printed: float) -> None:
    """Even and odd degrees of freedom, to the last printed digit."""
    assert t_quantile(probability, freedom) == pytest.approx(printed, abs=6e-4)


def test_wrong_quantiles_are_refused() -> None:
    with pytest.raises(ValueError, match="expected a probability"):
        t_quantile(1.0, 2)


def test_the_interval_of_three_values() -> None:
    """By hand: mean 2, standard deviation 1, so 4.303 / sqrt(3)."""
    found = interval([1.0, 2.0, 3.0])
    assert found is not None
    assert found.mean == 2.0
    assert found.half == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)
    assert (found.low, found.high) == (found.mean - found.half, found.mean + found.half)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Of 2,000 draws of three normal numbers, 95 % have the true mean inside, within four standard errors."""
    rng = random.Random(0)
    draws = [interval([rng.gauss(5.0, 2.0) for _ in range(3)]) for _ in range(2000)]
    inside = fmean(i is not None and i.low < 5.0 < i.high for i in draws)
    assert abs(inside - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 2000)


def test_one_seed_says_nothing_and_none_is_none() -> None:
    assert interval([]) is None
    assert interval([3.0]) == Interval(3.0, math.inf, 1)
    assert str(interval([3.0])) == "+3.00 (one seed)"
    assert str(interval([0.010, 0.012, 0.014])) == "+0.0120 ± 0.0050"


def test_pairs_are_made_by_seed() -> None:
    """What both seeds share cancels; a seed that one of them lacks is left out."""
    a, b = {0: 10.0, 1: 20.0, 2: 30.0, 3: 7.0}, {2: 29.0, 0: 9.0, 1: 19.0}
    assert paired(a, b) == Interval(1.0, 0.0, 3)
    assert paired(a, {9: 1.0}) is None
