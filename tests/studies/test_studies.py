"""The contract of every study, in tiny mode: it runs, and leaves its table, its figure and its verdict."""

import csv
import json
from pathlib import Path

import pytest
from drawings import ink, keep_figures, nothing_hides, points

from softmoe.cli import main
from softmoe.studies import LabOptions, find, names
from softmoe.studies.driver import Store, run_study
from softmoe.studies.lab import make_lab


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all, so that they share their runs."""
    return tmp_path_factory.mktemp("studies")


@pytest.mark.parametrize("name", names())
def test_every_study_ends_with_table_figure_and_verdict(name: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No panel of the figure is empty or without labels, each can be seen in the file, and no legend hides a part."""
    kept = keep_figures(monkeypatch)
    done = run_study(find(name), make_lab(LabOptions(scale="tiny")), Store(out))
    assert not done.stopped
    assert not done.failures
    folder = out / name
    rows = list(csv.DictReader((folder / "results.csv").read_text().splitlines()))
    assert rows
    panels = kept[f"{name}.png"].axes
    for number, axis in enumerate(panels):
        shown = len(points(axis)) or [text.get_text() for text in axis.texts]
        assert shown, f"panel {number} is empty"
        assert axis.get_xlabel() or axis.get_ylabel() or shown == ["not run"], f"panel {number} has no labels"
        assert ink(folder / f"{name}.png", axis) > 0.001, f"panel {number} cannot be seen"
    assert nothing_hides(kept[f"{name}.png"])
    verdict = json.loads((folder / "verdict.json").read_text())
    assert verdict["claims"]
    assert all(claim["verdict"] != "not run" for claim in verdict["claims"]), "a claim names cells that do not exist"


def test_tiny_is_a_smoke_test(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """On the command line three steps end in a table and the words, without a verdict and a picture of noise."""
    assert main(["study", "slot_correlation", "--scale", "tiny", "--out", str(tmp_path)]) == 0
    assert "smoke test" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "slot_correlation").iterdir()] == ["results.csv"]


@pytest.mark.parametrize("name", names())
def test_every_study_says_what_it_asks(name: str) -> None:
    """The docstring begins with a question and says what the paper found, and where."""
    text = find(name).__doc__ or ""
    assert text.split("\n", 1)[0].endswith("?")
    assert "The paper (" in text


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("scale", ["small", "paper"])
def test_every_study_plans_its_larger_sizes(name: str, scale: str) -> None:
    """At every size each cell resolves to a model, and no two cells of a study have the same labels and seed."""
    cells = list(find(name).cells(make_lab(LabOptions(scale=scale))))  # pyright: ignore[reportArgumentType]
    assert all(cell.job.flops() >= 0 for cell in cells)
    places = [(tuple(cell.labels.items()), cell.seed) for cell in cells]
    assert len(set(places)) == len(places)
