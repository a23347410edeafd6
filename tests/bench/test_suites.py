"""The suites of `softmoe bench`, on sizes that take no time, and what becomes of their rows."""

from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
from drawings import curves, ink, keep_figures
from torch import nn

from softmoe.bench import SUITES, cases, peers, report, suite
from softmoe.bench.cases import OneHotRouting, Row, compare_moves
from softmoe.bench.timing import Probes, Roofline, Timing
from softmoe.cli.cost import BenchArguments
from softmoe.models import MoEConfig, ViTConfig
from softmoe.moe import ExpertsChoiceRouter, SoftRouter, TokensChoiceRouter
from softmoe.train.config import OptimSection

SMALL = ViTConfig(
    image_size=8, patch_size=4, width=8, depth=2, mlp_dim=8, heads=2, num_classes=3, moe=MoEConfig.of(num_experts=2)
)


def row(seconds: float, *, name: str = "a", case: str = "c", spread: float = 0.01) -> Row:
    return Row(case, "train", name, Timing(seconds, spread, 5), 0.5)


def test_every_suite_has_a_name_and_a_function() -> None:
    """What the command takes is what there is."""
    assert set(get_args(get_type_hints(BenchArguments)["what"])) == set(SUITES)
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
    rows = list(cases.bench_scaling(Probes(), seconds=0.0, counts=(2, 8), tokens=16))
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

    model = peers.with_layers(SMALL, make)
    assert built == [(2, 1)]
    before = model.head.weight.detach().clone()  # pyright: ignore[reportAttributeAccessIssue]
    peers.train_step(model, torch.randn(2, 3, 8, 8), OptimSection())()
    assert not torch.equal(before, model.head.weight)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("name", peers.OURS)
def test_our_ways_to_train_move_the_weights_alike(name: str) -> None:
    """In the backward pass or after it, in float32 or bfloat16: the first update is the same, to rounding."""
    models = [peers.build(SMALL, each) for each in ("softmoe", name)]
    x = torch.randn(2, 3, 8, 8)
    for model, each in zip(models, ("softmoe", name), strict=True):
        peers.train_step(model, x, peers.OURS[each])()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-9)


@pytest.mark.slow
def test_a_contender_has_its_own_process() -> None:
    """Its time, its share of the roofline and its peak memory come back; a failure is told in one sentence."""
    found = peers.in_own_process("soft_ti16_2e", "softmoe, in backward", 1, "train", 0.0)
    assert found.timing.rounds == 3
    assert found.peak_bytes is not None
    assert found.peak_bytes > 10**8
    with pytest.raises(OSError, match="nobody at batch 1 did not finish: KeyError"):
        peers.in_own_process("soft_ti16_2e", "nobody", 1, "train", 0.0)


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


def test_experts_are_drawn_as_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A curve a name: images a second over the number of experts, and its roofline dotted above it."""
    kept = keep_figures(monkeypatch)
    rows = [
        row(seconds, case=case, name=name)
        for case, seconds in (("8 experts", 0.5), ("16 experts", 0.25))
        for name in ("a", "b")
    ]
    report.draw(rows, "a machine", tmp_path / "rows.png")
    (axis,) = kept["rows.png"].axes
    assert axis.get_title() == "a machine"
    assert {name: data.tolist() for name, data in curves(axis).items()} == {
        "a": [[8, 2], [16, 4]],
        "b": [[8, 2], [16, 4]],
    }
    dotted = [line.get_xydata().tolist() for line in axis.lines if line.get_linestyle() == ":"]
    assert dotted == [[[8, 4], [16, 8]]] * 2  # half of the roofline
    assert ink(tmp_path / "rows.png", axis) > 0.005


def test_other_cases_are_drawn_as_bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar a row, as long as its milliseconds, named by case, phase and name."""
    kept = keep_figures(monkeypatch)
    rows = [row(1.0, case="batch 1"), row(2.0, case="batch 8", name="b")]
    report.draw(rows, "a machine", tmp_path / "rows.png")
    (axis,) = kept["rows.png"].axes
    assert [bar.get_width() for bar in axis.patches] == [1000.0, 2000.0]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["batch 1, train: a", "batch 8, train: b"]
    assert ink(tmp_path / "rows.png", axis) > 0.3
