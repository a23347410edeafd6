"""The quickstart, whole, in its smallest form."""

from pathlib import Path

import pytest

from softmoe import cost
from softmoe.cli import main
from softmoe.recipes import quickstart, quickstart_dense


def test_quickstart_ends_with_table_picture_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quickstart", "--tiny", "--runs", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "quickstart_dense" in shown
    assert (tmp_path / "quickstart.png").stat().st_size > 5_000
    page = (tmp_path / "quickstart" / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "Inside quickstart" in page
    assert (tmp_path / "quickstart" / "inspect.html").stat().st_size > 10_000


def test_twins_cost_the_same_to_train() -> None:
    """Total training FLOPs of the two recipes agree within two percent; both see the same data; one has experts."""
    totals, params = [], []
    for module in (quickstart, quickstart_dense):
        config = module.recipe()
        shape = config.model.resolve(288, config.data.transform.image_size)
        totals.append(cost(shape).train_flops * config.steps * config.data.batch_size)
        params.append(cost(shape).params)
    assert totals[0] == pytest.approx(totals[1], rel=0.02)
    assert params[0] > 3 * params[1]
    assert quickstart.recipe().data == quickstart_dense.recipe().data
