"""The quickstart, whole, in its smallest form."""

import json
import re
from pathlib import Path

import pytest
from drawings import curves, ink, keep_figures

from softmoe import cost
from softmoe.cli import main
from softmoe.recipes import quickstart, quickstart_dense


def test_quickstart_ends_with_table_picture_and_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The picture shows both runs as their metrics have them; the page of what is inside has every layer and image."""
    kept = keep_figures(monkeypatch)
    assert main(["quickstart", "--tiny", "--runs", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "quickstart_dense" in shown
    accuracy, _, loss = kept["quickstart.png"].axes
    for name in ("quickstart", "quickstart_dense"):
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert curves(loss)[name][:, 1].tolist() == [row["loss"] for row in rows if row.get("loss") is not None]
        last = next(row for row in reversed(rows) if "val/top1" in row)
        assert curves(accuracy)[name][-1].tolist() == pytest.approx([last["flops"] * 1e-12, 100 * last["val/top1"]])
    assert all(ink(tmp_path / "quickstart.png", axis) > 0.002 for axis in kept["quickstart.png"].axes)
    page = (tmp_path / "quickstart" / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "Inside quickstart" in page
    inside = (tmp_path / "quickstart" / "inspect.html").read_text()
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', inside, re.S).group(1))  # pyright: ignore[reportOptionalMemberAccess]
    (model,) = data["models"]
    blocks = quickstart.tiny().model.resolve(288, 32).moe_blocks
    assert len(model["layers"]) == len(blocks) > 0
    assert len(model["images"]) == len(data["pictures"]) == 4


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
