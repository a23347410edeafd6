"""The quickstart, whole, in its smallest form."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from drawings import curves, ink, keep_figures

from softmoe import cost
from softmoe.cli import main
from softmoe.recipes import quickstart
from softmoe.studies.quickstart import NAMES, models


def test_quickstart_ends_with_table_pictures_and_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Curves and gains are those of the runs' metrics; the page of what is inside has every layer and image."""
    kept = keep_figures(monkeypatch)
    assert main(["quickstart", "--tiny", "--jobs", "1", "--runs", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    accuracy, _, loss = kept["quickstart.png"].axes
    last: dict[str, float] = {}
    for name, method in NAMES.items():
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert curves(loss)[name][:, 1].tolist() == [row["loss"] for row in rows if row.get("loss") is not None]
        row = next(row for row in reversed(rows) if "val/top1" in row)
        assert curves(accuracy)[name][-1].tolist() == pytest.approx([row["flops"] * 1e-12, 100 * row["val/top1"]])
        last[method] = 100 * row["val/top1"]
    assert f"What experts give: {last['soft'] - last['one']:+.1f} points" in shown
    assert f"What slots give: {last['one'] - last['dense']:+.1f} points" in shown
    for picture, panels in (("quickstart.png", 3), ("quickstart_gains.png", 2)):
        axes = kept[picture].axes
        assert len(axes) == panels
        assert all(ink(tmp_path / picture, axis) > 0.002 for axis in axes)
    page = (tmp_path / "quickstart" / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "What slots, experts and a place give" in page
    assert "Inside quickstart" in page
    inside = (tmp_path / "quickstart" / "inspect.html").read_text()
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', inside, re.S).group(1))  # pyright: ignore[reportOptionalMemberAccess]
    (model,) = data["models"]
    blocks = quickstart.tiny().model.resolve(20, 32).moe_blocks
    assert len(model["layers"]) == len(blocks) > 0
    assert len(model["images"]) == len(data["pictures"]) == 4


def test_only_what_is_compared_differs(tmp_path: Path) -> None:
    """Same data and slots; the dense model alone has more steps, so more computing than each of the others, and its own
    best rate."""
    runs = dict(zip(NAMES.values(), models(tmp_path, seed=3, tiny=False), strict=True))
    shapes = {method: config.model.resolve(1000, quickstart.IMAGE) for method, config in runs.items()}
    totals = {method: cost(shapes[method]).train_flops * config.steps for method, config in runs.items()}
    assert max(totals, key=totals.__getitem__) == "dense"
    for config in runs.values():
        assert (config.data, config.seed) == (runs["placed"].data, 3)
        rate = replace(config.schedule, peak=config.schedule.peak / (2 if config is runs["dense"] else 1))
        assert (rate, config.optim) == (runs["placed"].schedule, runs["placed"].optim)
    assert [config.steps for method, config in runs.items() if method != "dense"] == [quickstart.STEPS] * 5
    routers = {method: shape.moe.router for method, shape in shapes.items() if shape.moe is not None}
    assert (routers["identity"].name, routers.pop("identity").num_experts) == ("identity", 16)
    slots = {method: (r.name, r.num_experts * vars(r)["slots_per_expert"]) for method, r in routers.items()}
    assert slots == {"one": ("soft", 16), "soft": ("soft", 16), "placed one": ("placed", 16), "placed": ("placed", 16)}
