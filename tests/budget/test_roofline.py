"""The computed least time of a layer on devices that are not here."""

import sys
from pathlib import Path

import pytest

from softmoe.budget.plan import DEVICES

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from layer_roofline import seconds, share_of_peak, stages, table


@pytest.mark.parametrize("name", DEVICES)
def test_kernels_move_less_and_compute_the_same(name: str) -> None:
    """FLOPs are those of the layer, in both ways; the kernels' time is less, and no share of the peak is above one."""
    shape = (64, 196, 384, 1536, 128)
    plain, kernels = (stages(*shape, kernels=k) for k in (False, True))
    B, M, D, H, N = shape
    for passes in (plain, kernels):
        assert sum(stage.flops for stage in passes) == B * (3 * 2 * M * D * N + 2 * 2 * N * D * H)
        assert 0 < share_of_peak(DEVICES[name], passes) < 1
    assert seconds(DEVICES[name], kernels) < seconds(DEVICES[name], plain)


def test_with_few_rows_only_the_weights_count() -> None:
    """At one image the time is about that of reading the experts once."""
    device = DEVICES["h100"]
    weights = 2 * 2 * 256 * 1280 * 5120 / device.memory_rate
    assert seconds(device, stages(1, 256, 1280, 5120, 256, kernels=True)) == pytest.approx(weights, rel=0.02)


def test_the_table_has_a_row_for_each_case() -> None:
    assert len(table()) == 2 + 3 * 2 * 4
