import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from softmoe.train.config import ScheduleSection
from softmoe.train.optim import make_schedule


def test_rsqrt_golden():
    """The reference's golden case: peak .1, 12 steps, warm-up 4, timescale 2, cooldown 3."""
    rate = make_schedule(ScheduleSection("rsqrt", peak=0.1, warmup=4, timescale=2, cooldown=3), 12)
    before = [0.0, 0.025, 0.05, 0.075, 0.1, 0.0816497, 0.0707107, 0.0632456, 0.0577350]
    cooling = [0.0534522, 0.0356348, 0.0178174, 0.0]
    assert [rate(t) for t in range(13)] == pytest.approx([*before, *cooling], abs=1e-7)


@pytest.mark.parametrize(
    ("step", "expected"), [(20_000, 7.07e-4), (110_000, 3.02e-4), (250_000, 2.0e-4), (1_950_000, 7.16e-5)]
)
def test_rsqrt_of_the_paper(step: int, expected: float):
    """Values of the JFT schedule: peak 1e-3, warm-up and timescale 10k."""
    rate = make_schedule(ScheduleSection("rsqrt", peak=1e-3, warmup=10_000, timescale=10_000), 4_000_000)
    assert rate(step) == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize(("kind", "middle"), [("linear", 0.055), ("cosine", 0.055), ("constant", 0.1)])
def test_end_points(kind, middle: float):
    """Linear and cosine go from the peak at the end of the warm-up to `end` at the last step and stay there."""
    rate = make_schedule(ScheduleSection(kind, peak=0.1, warmup=10, end=0.01), 110)
    assert (rate(0), rate(5), rate(10)) == (0.0, 0.05, 0.1)
    assert rate(60) == pytest.approx(middle)
    assert rate(110) == rate(500) == pytest.approx(0.1 if kind == "constant" else 0.01)


sections = st.builds(
    ScheduleSection,
    kind=st.sampled_from(["rsqrt", "linear", "cosine", "constant"]),
    peak=st.floats(1e-6, 10.0),
    warmup=st.integers(0, 50),
    timescale=st.integers(1, 100),
    cooldown=st.integers(0, 50),
    end=st.just(0.0),
    decay_steps=st.none() | st.integers(1, 300),
)


@given(sections, st.integers(100, 300), st.integers(0, 600))
def test_never_negative_nor_above_the_peak(section: ScheduleSection, steps: int, step: int):
    """0 <= rate <= peak at any step, also past the end of the run."""
    assert 0.0 <= make_schedule(section, steps)(step) <= section.peak * (1 + 1e-12)


@given(sections, st.integers(100, 300))
def test_rises_then_falls(section: ScheduleSection, steps: int):
    """The rate grows in the warm-up and never afterwards; a cooldown ends at exactly 0."""
    rate = make_schedule(section, steps)
    rates = [rate(t) for t in range(steps + 1)]
    rising, falling = rates[: section.warmup + 1], rates[section.warmup :]
    assert rising == sorted(rising)
    assert all(a >= b - 1e-12 * section.peak for a, b in pairwise(falling))
    if section.cooldown:
        assert rates[-1] == 0.0


@given(st.integers(0, 40), st.integers(1, 40))
def test_cooldown_is_a_straight_line(start: int, length: int):
    """During a cooldown of C steps the rate falls by the same amount each step."""
    section = ScheduleSection("rsqrt", peak=1.0, warmup=0, timescale=7, cooldown=length)
    rate = make_schedule(section, start + length)
    first = 1 / math.sqrt(1 + start / 7)
    for i in range(length):
        assert rate(start + i) == pytest.approx(first * (1 - i / length))
