"""The paper's cost columns: what is printed there, and how near the formulas come."""

import pytest
import torch

from softmoe.budget import cost
from softmoe.budget.paper import (
    LARGE,
    MISFITS,
    Comparison,
    ParetoRun,
    compare_long_runs,
    compare_pareto_runs,
    exaflop,
    long_run_config,
    long_runs,
    pareto_arguments,
    pareto_config,
    pareto_runs,
    read_table,
    summary,
)
from softmoe.models import create_model, model_config
from softmoe.models.registry import PAPER_MODELS
from softmoe.moe import TokensChoiceConfig

LONG, PARETO = compare_long_runs(), compare_pareto_runs()


def percent(errors: dict[str, tuple[int, float, float]]) -> dict[str, tuple[int, float, float]]:
    return {routing: (rows, round(100 * mid, 2), round(100 * top, 2)) for routing, (rows, mid, top) in errors.items()}


def ref(comparison: Comparison) -> int:
    assert isinstance(comparison.run, ParetoRun)
    return comparison.run.ref


def test_tables_are_whole() -> None:
    """All nine tables ship with the package and have their rows."""
    rows = {
        "ablations": 6, "bpr": 8, "lit": 10, "long_runs": 8, "long_runs_upstream": 17, "pareto_runs": 107,
        "placement_experts_choice": 8, "placement_soft": 8, "placement_tokens_choice": 8,
    }  # fmt: skip
    assert {name: len(read_table(name)) for name in rows} == rows
    assert [run.ref for run in pareto_runs()] == list(range(1, 108))
    with pytest.raises(ValueError, match="unknown table 'pareto', the paper's tables are: ablations, bpr"):
        read_table("pareto")


def test_long_run_errors() -> None:
    """exaFLOP: median and largest error of the 25 rows."""
    assert percent(summary(LONG)) == {"Dense": (10, 0.02, 0.08), "Soft MoE": (15, 0.03, 0.07)}


def test_pareto_errors() -> None:
    """exaFLOP: median and largest error of all 107 rows, and without the seven large misfits."""
    assert percent(summary(PARETO)) == {
        "Dense": (8, 0.16, 9.16),
        "Soft MoE": (18, 0.13, 12.13),
        "Tokens Choice": (38, 0.16, 12.30),
        "Experts Choice": (43, 0.20, 12.20),
    }
    assert percent(summary(PARETO, without_large_misfits=True)) == {
        "Dense": (7, 0.11, 0.91),
        "Soft MoE": (17, 0.13, 1.13),
        "Tokens Choice": (36, 0.14, 0.92),
        "Experts Choice": (40, 0.16, 1.25),
    }


def test_rows_within_the_printed_digit() -> None:
    """62 of the 100 Pareto rows outside the large misfits round to the printed number."""
    others = [row for row in PARETO if ref(row) not in LARGE]
    assert len(others) == 100
    assert sum(abs(row.exaflop - row.run.exaflop) <= 0.05 for row in others) == 62


def test_gflop_per_image() -> None:
    """The printed digit is reproduced for 8 of the 10 models; the others are the two Soft H/14."""
    wrong = {(row.run.model, row.run.routing) for row in LONG if f"{row.gflop:.1f}" != f"{row.run.gflop:.1f}"}
    assert wrong == {("H/14", "Soft MoE")}
    assert max(abs(row.gflop_error) for row in LONG if row.gflop_error is not None) < 0.005


def test_printed_parameters() -> None:
    """Printed parameters are ours with the digits cut off, but for ViT H/14."""
    for run, row in zip(long_runs(), LONG, strict=True):
        cut = row.params // 10**6 if run.params.endswith("M") else row.params // 10**8 / 10
        printed = float(run.params[:-1])
        assert printed == (cut + 1 if (run.model, run.routing) == ("H/14", "Dense") else cut)


def test_misfits_are_named() -> None:
    """Every row that is more than 1.3 % off belongs to a misfit, and each small misfit is 0.3 to 0.9 % high."""
    assert {ref(row) for row in PARETO if abs(row.error) > 0.013} == LARGE
    named = {ref(row): row for row in PARETO if row.misfit}
    assert set(named) == {number for misfit in MISFITS for number in misfit.refs}
    assert all(0.003 < row.error < 0.009 for number, row in named.items() if number not in LARGE)
    signs = {101: -12.1, 102: -9.2, 103: -12.2, 106: -12.3, 93: -4.6, 96: -5.7, 99: 3.6}
    assert {number: round(100 * named[number].error, 1) for number in signs} == signs


def test_long_runs_are_the_named_models() -> None:
    """The ten models of the long-run tables are exactly those that the registry names."""
    assert {long_run_config(run) for run in long_runs()} == {
        model_config(name, num_classes=29_593) for name in PAPER_MODELS
    }


def test_every_pareto_row_can_be_created() -> None:
    """A name and arguments for create_model give the row's model, with the row's settings."""
    for run in pareto_runs()[::9]:
        name, arguments = pareto_arguments(run)
        with torch.device("meta"):
            model = create_model(name, **arguments)
        assert model.config == pareto_config(run)
        assert sum(p.numel() for p in model.parameters()) == cost(model).params
    row_84 = pareto_config(pareto_runs()[83]).moe
    assert row_84 is not None
    router = row_84.router
    assert isinstance(router, TokensChoiceConfig)
    assert (router.num_experts, router.top_k, router.capacity_factor, router.group_size) == (32, 2, 2.0, 392)
    assert all(pareto_config(run).patch_size == int(run.model.split("/")[1]) for run in pareto_runs())


def test_capacity_is_rounded_half_to_even() -> None:
    """Row 42: 1568 / 64 = 24.5 becomes 24, so 192 rows per image; 25 would miss the printed number by far."""
    run = pareto_runs()[41]
    config = pareto_config(run)
    assert cost(config).parts["experts"].macs == 6 * 2 * 192 * 384 * 1536
    assert exaflop(config, 300_000) == pytest.approx(run.exaflop, abs=0.05)
