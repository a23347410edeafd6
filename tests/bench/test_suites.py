"""The suites of `softmoe bench`, on sizes that take no time, and what becomes of their rows."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from softmoe.bench import peer_models, report, scaling
from softmoe.bench.cases import Row
from softmoe.bench.roofline import Probes, Roofline
from softmoe.bench.routers import OneHotRouting, compare_moves
from softmoe.bench.suites import SUITES, suite
from softmoe.bench.timing import Timing
from softmoe.cli.bench import What
from softmoe.models import MoEConfig, ViTConfig
from softmoe.moe import ExpertsChoiceRouter, SoftRouter, TokensChoiceRouter
from softmoe.train.config import OptimSection

SMALL = ViTConfig(
    image_size=8, patch_size=4, width=8, depth=2, mlp_dim=8, heads=2, num_classes=3, moe=MoEConfig(num_experts=2)
)


def row(seconds: float, *, name: str = "a", case: str = "c", spread: float = 0.01) -> Row:
    return Row(case, "train", name, Timing(seconds, spread, 5), 0.5)


def test_every_suite_has_a_name_and_a_function() -> None:
    """What the command takes is what there is."""
    assert set(What.__args__) == set(SUITES)  # pyright: ignore[reportAttributeAccessIssue]
    assert all(callable(suite(name)) for name in SUITES)


@pytest.mark.parametrize("router", [TokensChoiceRouter(8, 5, 2), ExpertsChoiceRouter(8, 5)])
def test_one_hot_routing_is_the_routing_by_index(router: nn.Module) -> None:
    """The baseline moves the same rows to the same places with the same weights."""
    x = torch.randn(3, 7, 8)
    routing = router.eval()(x)
    baseline = OneHotRouting(routing)
    torch.testing.assert_close(baseline.dispatch(x), routing.dispatch(x))
    y = torch.randn_like(routing.dispatch(x))
    torch.testing.assert_close(baseline.combine(y), routing.combine(y))
    assert baseline.auxiliary_loss == 0


def test_moves_are_timed_beside_the_baseline() -> None:
    tokens = torch.randn(8, 6, 384)
    routers = {"soft": SoftRouter(384, 3), "tokens choice": TokensChoiceRouter(384, 3)}
    rows = list(compare_moves(3, routers, tokens, Probes(), seconds=0.0))
    assert [r.name for r in rows] == ["soft", "tokens choice", "tokens choice, one-hot"]
    assert all(r.roofline is not None and r.roofline > 0 for r in rows)


def test_scaling_keeps_the_slots() -> None:
    """Three routers at every number of experts."""
    rows = list(scaling.bench_scaling(Probes(), seconds=0.0, counts=(2, 8), tokens=16))
    assert [(r.case, r.name) for r in rows[:3]] == [
        ("2 experts", "soft"),
        ("2 experts", "tokens choice"),
        ("2 experts", "experts choice"),
    ]
    assert len(rows) == 6


def test_a_peer_stands_where_the_experts_stood() -> None:
    """The other layer is in the MoE blocks only, given experts and slots; the model computes and trains."""
    built = []

    def make(experts: int, slots: int) -> nn.Module:
        built.append((experts, slots))
        return nn.Linear(8, 8)

    model = peer_models.with_layers(SMALL, make)
    assert built == [(2, 1)]
    before = model.head.weight.detach().clone()  # pyright: ignore[reportAttributeAccessIssue]
    peer_models.train_step(model, torch.randn(2, 3, 8, 8), OptimSection())()
    assert not torch.equal(before, model.head.weight)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("name", peer_models.OURS)
def test_our_ways_to_train_move_the_weights_alike(name: str) -> None:
    """In the backward pass or after it, in float32 or bfloat16: the first update is the same, to rounding."""
    models = [peer_models.build(SMALL, each) for each in ("softmoe", name)]
    x = torch.randn(2, 3, 8, 8)
    for model, each in zip(models, ("softmoe", name), strict=True):
        peer_models.train_step(model, x, peer_models.OURS[each])()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-9)


def test_a_contender_has_its_own_process() -> None:
    """Its time, its share of the roofline and its peak memory come back; a failure is told in one sentence."""
    found = peer_models.in_own_process("soft_ti16_2e", "softmoe, in backward", 1, "train", 0.0)
    assert found.timing.rounds == 3
    assert found.peak_bytes is not None
    assert found.peak_bytes > 10**8
    with pytest.raises(OSError, match="nobody at batch 1 did not finish: KeyError"):
        peer_models.in_own_process("soft_ti16_2e", "nobody", 1, "train", 0.0)


def test_saved_rows_come_back(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    rows = [row(1.0), replace(row(2.0), peak_bytes=5)]
    report.save(rows, Roofline(1e9, 1e9), path)
    machine, again = report.load(path)
    assert again == rows
    assert machine["torch"] == torch.__version__
    path.write_text("{}")
    with pytest.raises(ValueError, match="does not hold timings"):
        report.load(path)


def test_differences_are_those_beyond_the_noise() -> None:
    """Twice the joint spread, and 3 % at least."""
    old = [row(1.0), row(1.0, name="b", spread=0.2), row(1.0, name="c"), row(1.0, name="gone")]
    new = [row(1.02), row(1.3, name="b", spread=0.2), row(0.5, name="c"), row(1.0, name="new")]
    lines = list(report.differences(old, new))
    assert lines == [
        "faster: c, train, c: 1000.00 -> 500.00 ms (2.00 x)",
        "within the noise: 2 rows; only now: 1; only before: 1",
    ]


@pytest.mark.parametrize("cases", [("8 experts", "16 experts"), ("batch 1", "batch 8")])
def test_rows_are_drawn(tmp_path: Path, cases: tuple[str, str]) -> None:
    pytest.importorskip("matplotlib")
    rows = [row(index + 1.0, case=case, name=name) for index, case in enumerate(cases) for name in ("a", "b")]
    report.draw(rows, "a machine", tmp_path / "rows.png")
    assert (tmp_path / "rows.png").stat().st_size > 5000
