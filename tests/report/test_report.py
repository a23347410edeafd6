"""Reports: read back what training wrote, compare it truly, and let nothing in a name run in the page."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from drawings import curves, nothing_hides

from softmoe.cli import main
from softmoe.recipes import quickstart, quickstart_dense
from softmoe.report import differences, load_run, summary_table, table_text, write_report
from softmoe.report.runs import as_svg, comparison, router_health
from softmoe.train import train


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    names = {"soft <script>alert(1)<": quickstart, "dense": quickstart_dense}
    folders = []
    for name, module in names.items():
        config = module.tiny()
        config = replace(config, runs=str(folder), run_name="plain", log=replace(config.log, every=1))
        folders.append(train(config).folder.path.rename(folder / name))  # as somebody may rename a folder later
    return folders


def test_record_is_what_training_wrote(runs: list[Path]) -> None:
    """Settings, model and curves come back from the files."""
    soft, dense = map(load_run, runs)
    assert soft.model.moe is not None
    assert dense.model.moe is None
    steps, losses = soft.curve("step", "loss")
    assert steps == list(range(1, soft.config.steps + 1))
    assert all(loss > 0 for loss in losses)
    assert soft.last("images") == soft.config.steps * soft.config.data.batch_size
    assert set(soft.routers("scale")) == {f"encoder.blocks.{i}.mlp" for i in soft.model.moe_blocks}
    assert dense.routers("scale") == {}


def test_a_torn_last_line_is_passed_over(runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((runs[0] / "config.json").read_text())
    whole = (runs[0] / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(whole + '{"step": 99, "lo')
    assert load_run(tmp_path).rows == load_run(runs[0]).rows


def test_table_and_differences(runs: list[Path]) -> None:
    """One line per run with the true cost; only keys that differ are listed."""
    records = [load_run(folder) for folder in runs]
    records[0] = replace(records[0], config=replace(records[0].config, runs="elsewhere"))
    table = summary_table(records)
    assert [line[0] for line in table[1:]] == [record.name for record in records]
    assert len({len(line) for line in table_text(table).splitlines()}) == 1
    for record, line in zip(records, table[1:], strict=True):
        shown, found = dict(zip(table[0], line, strict=True)), record.curve("step", "val/top1")[1]
        assert (shown["best top-1 %"], shown["last top-1 %"]) == (f"{100 * max(found):.2f}", f"{100 * found[-1]:.2f}")
    keys = {line[0] for line in differences(records)}
    assert any(key.startswith("model.") for key in keys)
    assert "seed" not in keys
    assert not {"run_name", "runs"} & keys


def test_page_is_whole_and_escaped(runs: list[Path], tmp_path: Path) -> None:
    """A run's name cannot run script; the page refers to nothing outside itself."""
    page = write_report([load_run(folder) for folder in runs], tmp_path / "page.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "<svg" in page
    assert "src=" not in page
    assert '<link rel="stylesheet"' not in page
    assert '<table class="settings">' in page  # whose long names and values wrap


def test_figures(runs: list[Path]) -> None:
    """Curves are those of the metrics, one a run; a router's panel has one a layer, a dense run no panel."""
    soft, dense = map(load_run, runs)
    figure = comparison([soft, dense])
    for axis, (x, y, x_factor, y_factor) in zip(
        figure.axes,
        [("flops", "val/top1", 1e-12, 100), ("device_seconds", "val/top1", 1, 100), ("images", "loss", 1e-3, 1)],
        strict=True,
    ):
        for run in (soft, dense):
            xs, ys = run.curve(x, y)
            assert xs
            shown = curves(axis)[run.name]
            assert shown == pytest.approx(np.array([[a * x_factor, b * y_factor] for a, b in zip(xs, ys, strict=True)]))
    text = as_svg(figure)
    assert text.lstrip().startswith("<svg")
    assert text.count("<path") > 20
    health = router_health(soft)
    assert health.axes[0].get_ylabel() == "scale of the logits"
    for axis in health.axes:
        assert list(curves(axis)) == [f"blocks.{i}" for i in soft.model.moe_blocks]
    assert router_health(dense) is None


def test_long_names_hide_nothing(runs: list[Path]) -> None:
    """Seven runs with long names: each is named, beside the curves and inside the picture."""
    many = [
        replace(load_run(runs[0]), name=f"small_data_with_a_place_and_cutmix_at_96_pixels_seed_{i}") for i in range(7)
    ]
    figure = comparison(many)
    assert nothing_hides(figure)
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == [run.name for run in many]
    assert nothing_hides(router_health(many[0]))


def test_wide_numbers_do_not_run_into_each_other(runs: list[Path]) -> None:
    """The labels 0.0025, 0.0050, ... of the FLOPs of a small sweep have room between them."""
    rows = tuple({"step": step, "val/top1": 0.5, "flops": step * 1.75e9} for step in range(11))
    figure = comparison([replace(load_run(runs[0]), rows=rows)])
    figure.canvas.draw()
    boxes = [label.get_window_extent() for label in figure.axes[0].get_xticklabels()]
    assert all(a.x1 + 4 < b.x0 for a, b in pairwise(boxes))


def test_not_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "not the folder of a run" in capsys.readouterr().err


def test_a_run_without_metrics_is_left_out(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that was stopped early does not keep the others from their page; alone it is refused."""
    early, page = tmp_path / "early", tmp_path / "page.html"
    (early / "checkpoints").mkdir(parents=True)
    (early / "config.json").write_text((runs[1] / "config.json").read_text())
    assert main(["report", str(early), str(runs[1]), "--out", str(page)]) == 0
    assert f"{early} is left out" in capsys.readouterr().err
    assert "<td>dense</td>" in page.read_text()
    assert main(["report", str(early)]) == 2
    assert "none of the runs has metrics yet" in capsys.readouterr().err
