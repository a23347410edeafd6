"""The table of results: choosing rows, means by seed, CSV; and the verdict drawn from it."""

import csv
import io
import json
from pathlib import Path

import pytest

from softmoe.storage.files import write_text
from softmoe.studies.results import Claim, Interval, Row, Table, better, write_verdict


@pytest.fixture
def table() -> Table:
    rows = [
        Row({"router": router, "experts": experts, "blocks": (2, 3)}, seed, {"top1": value + seed, "val_loss": -value})
        for router, experts, value in (("soft", 4, 10.0), ("soft", 16, 12.0), ("dense", None, 9.0))
        for seed in range(3)
    ]
    return Table(tuple(rows))


def test_rows_are_chosen_by_labels(table: Table) -> None:
    """One value, several, none at all, and a tuple that is itself a value."""
    assert len(table.where(router="soft")) == 6
    assert len(table.where(router="soft", experts=4)) == 3
    assert len(table.where(experts=(4, 16))) == 6
    assert len(table.where(router="uniform")) == 0
    assert len(table.where(blocks=(2, 3))) == 9
    assert table.distinct("router") == ["soft", "dense"]


def test_means_are_by_seed(table: Table) -> None:
    """Two rows of a seed are averaged first: the interval counts seeds, not runs."""
    assert table.where(router="soft").values("top1") == {0: 11.0, 1: 12.0, 2: 13.0}
    assert table.where(router="soft").minus(table.where(router="dense"), "top1") == Interval(2.0, 0.0, 3)
    assert table.mean("nothing") is None
    assert table.interval("nothing") is None


def test_csv_holds_everything(table: Table) -> None:
    rows = list(csv.DictReader(io.StringIO(table.to_csv())))
    assert len(rows) == 9
    assert rows[3] == {
        "router": "soft", "experts": "16", "blocks": "2 3", "seed": "0", "top1": "12", "val_loss": "-12", "run": "",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (Interval(1.0, 0.5, 3), "confirmed"),
        (Interval(-1.0, 0.5, 3), "opposite"),
        (Interval(1.0, 2.0, 3), "not confirmed at this size"),
        (Interval(1.0, float("inf"), 1), "not confirmed at this size"),
        (None, "not run"),
    ],
)
def test_words_follow_from_the_interval(found: Interval | None, word: str) -> None:
    """Only an interval that leaves zero out decides; one seed never does."""
    claim = Claim("a > b", found, "+2")
    assert claim.word == word
    json.dumps(claim.to_dict(), allow_nan=False)


def test_better_looks_at_each_measure(table: Table) -> None:
    """Higher accuracy and lower loss are better; measures that were not taken are not mentioned."""
    found = list(better(table.where(experts=16), table.where(experts=4), "more experts", {"top1": "+1"}))
    assert [(c.text, c.found, c.paper) for c in found] == [
        ("more experts: validation top-1", Interval(2.0, 0.0, 3), "+1"),
        ("more experts: validation loss", Interval(2.0, 0.0, 3), ""),
    ]


def test_verdict_files(tmp_path: Path) -> None:
    claims = [Claim("a > b", Interval(1.0, 0.5, 3), "+2"), Claim("c > d", None, "")]
    page, values = write_verdict(tmp_path / "new", "name", "The story.", claims, ["A note."])
    assert "| a > b | +2 | +1.00 ± 0.50 points, 3 seeds | confirmed |" in page.read_text()
    assert [c["verdict"] for c in json.loads(values.read_text())["claims"]] == ["confirmed", "not run"]


def test_files_are_whole(tmp_path: Path) -> None:
    """Written beside and renamed: nothing else is left in the folder."""
    path = write_text(tmp_path / "a" / "b.csv", "1")
    write_text(path, "2")
    assert [p.name for p in path.parent.iterdir()] == ["b.csv"]
    assert path.read_text() == "2"
