"""The driver: nothing is done twice, a stop is gone on from, a failure leaves the others alone."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from softmoe.cli import main
from softmoe.studies import LabOptions, Study
from softmoe.studies.catalog import ablations
from softmoe.studies.driver import Store, estimate, run_study, unfinished
from softmoe.studies.jobs import Job, Stopped, Training, key_of
from softmoe.studies.lab import Cell, Lab, make_lab
from softmoe.studies.workers import own_gpu
from softmoe.train import loop

LAB = make_lab(LabOptions(scale="tiny", seeds=2))


@dataclass(frozen=True)
class Note:
    """A job that writes down that it was done; `how` may be to fail or to be stopped."""

    name: str
    how: str = "well"
    needs: Job | None = None
    has_features = False

    def identity(self) -> dict[str, Any]:
        return {"note": self.name}

    def flops(self) -> float:
        return 1e9

    def run(self, folder: Path) -> dict[str, float]:
        with (folder.parent / "log").open("a") as file:
            file.write(f"{self.name}\n")
        if self.how == "badly":
            raise RuntimeError("it broke")
        if self.how == "stopped":
            raise Stopped
        return {"top1": float(len(self.name))}


def study(*notes: Note) -> ModuleType:
    """A study of these jobs, without claims."""
    module = ModuleType("softmoe.studies.catalog.notes", "Is it noted?")
    module.cells = lambda lab: [Cell({"note": note.name}, 0, note) for note in notes]  # type: ignore[attr-defined]
    module.claims = lambda table: []  # type: ignore[attr-defined]
    module.figure = ablations.figure  # type: ignore[attr-defined]
    return module


def done(out: Path) -> list[str]:
    return (out / "runs" / "log").read_text().split()


def quiet(line: str) -> None:
    pass


def test_nothing_is_done_twice(tmp_path: Path) -> None:
    """Two cells of one job, a job another one needs, a second call, another study: each job is done once."""
    a, b = Note("a"), Note("b")
    c = Note("c", needs=a)
    store = Store(tmp_path)
    run_study(study(c, b, replace(b)), LAB, store, say=quiet)
    assert done(tmp_path) == ["a", "c", "b"]
    result = run_study(study(a, b, c), LAB, store, say=quiet)
    assert done(tmp_path) == ["a", "c", "b"]
    assert [row.numbers["top1"] for row in result.table] == [1.0, 1.0, 1.0]


def test_only_some_cells_are_run(tmp_path: Path) -> None:
    """The table is of all that is done; words that no label has are refused with the labels there are."""
    store, notes = Store(tmp_path), study(Note("ab"), Note("bc"), Note("cd"))
    run_study(notes, LAB, store, Study((), only=("b",)), say=quiet)
    assert done(tmp_path) == ["ab", "bc"]
    assert estimate(notes, LAB, store, ("c",)).jobs == 1
    assert len(run_study(notes, LAB, store, Study((), only=("d",)), say=quiet).table) == 3
    with pytest.raises(ValueError, match="no cell has x in a label; labels are ab, bc, cd"):
        run_study(notes, LAB, store, Study((), only=("x",)), say=quiet)


def test_a_failure_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    lines: list[str] = []
    result = run_study(study(Note("a"), Note("b", "badly"), Note("c")), LAB, Store(tmp_path), say=lines.append)
    assert list(result.failures.values()) == ["RuntimeError: it broke"]
    assert [row.labels["note"] for row in result.table] == ["a", "c"]
    assert any("failed, RuntimeError: it broke" in line for line in lines)
    again = run_study(study(Note("a"), Note("b"), Note("c")), LAB, Store(tmp_path), say=quiet)
    assert done(tmp_path) == ["a", "b", "c", "b"]
    assert not again.failures


def test_a_stopped_study_goes_on(tmp_path: Path) -> None:
    """What was done stays, nothing after the stop is begun, and the table on disk is that of what is done."""
    first = run_study(study(Note("a"), Note("b", "stopped"), Note("c")), LAB, Store(tmp_path), say=quiet)
    assert first.stopped
    assert done(tmp_path) == ["a", "b"]
    assert (tmp_path / "notes" / "results.csv").read_text().count("\n") == 2
    second = run_study(study(Note("a"), Note("b"), Note("c")), LAB, Store(tmp_path), say=quiet)
    assert not second.stopped
    assert done(tmp_path) == ["a", "b", "b", "c"]


@pytest.mark.slow
def test_several_processes_give_the_same_table(tmp_path: Path) -> None:
    """Two at a time, each with one thread, the results are those of one after another."""
    lab = make_lab(LabOptions(scale="tiny", seeds=1))
    tables = []
    for name, count in (("one", 1), ("two", 2)):
        result = run_study(few(), lab, Store(tmp_path / name), Study((), jobs=count), say=quiet)
        assert not result.failures
        tables.append([(row.labels, row.seed, row.numbers["val_loss"]) for row in result.table])
    assert tables[0] == tables[1]
    assert len(tables[0]) == 2


def few() -> ModuleType:
    module = study()

    def cells(lab: Lab) -> Iterator[Cell]:
        yield from lab.over_seeds(lab.config("soft"), method="soft")
        yield from lab.over_seeds(lab.config("dense"), method="dense")

    module.cells = cells  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize(
    ("given", "count", "names"),
    [(None, 2, ["0", "1", "0"]), ("2,3", 2, ["2", "3", "2"]), ("GPU-a, GPU-b,-1,1", 2, ["GPU-a", "GPU-b", "GPU-a"])],
)
def test_workers_take_the_gpus_that_the_user_left(given, count, names, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs go round over CUDA_VISIBLE_DEVICES as it was given, by number or by name."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert [own_gpu(place, count) for place in range(3)] == names


def test_a_signal_in_training_stops_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM in the middle of the first run: the driver says so, and the next call ends as if nothing had been."""
    lab = make_lab(LabOptions(scale="tiny", seeds=1))
    whole = run_study(few(), lab, Store(tmp_path / "whole"), say=quiet)

    real = loop.after_step

    def kill(run: Any, *args: Any, **named: Any) -> None:
        real(run, *args, **named)
        if run.done.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(loop, "after_step", kill)
    assert run_study(few(), lab, Store(tmp_path / "cut"), say=quiet).stopped
    monkeypatch.setattr(loop, "after_step", real)
    again = run_study(few(), lab, Store(tmp_path / "cut"), say=quiet)
    assert [r.numbers["val_loss"] for r in again.table] == [r.numbers["val_loss"] for r in whole.table]


def test_keys_depend_on_what_decides_and_on_nothing_else() -> None:
    """Seed, model and data are another run; threads, names and how often one logs are not."""
    config = LAB.config("soft")
    same = replace(config, threads=2, run_name="x", log=replace(config.log, every=7))
    assert key_of(Training(config)) == key_of(Training(same))
    others = [
        replace(config, seed=1),
        replace(config, steps=4),
        LAB.config("soft", slots_per_expert=2),
        LAB.config("dense"),
        replace(config, data=replace(config.data, train="shapes?size=32&length=1024&seed=1")),
        replace(config, evaluation=replace(config.evaluation, examples=8)),
    ]
    assert len({key_of(Training(c)) for c in [config, *others]}) == 7


def test_transfer_is_added_to_runs_that_are_done(tmp_path: Path) -> None:
    """Asked for later, only the 10-shot accuracy is computed; without it the table has no such column."""
    lab = make_lab(LabOptions(scale="tiny", seeds=1))
    plain = run_study(few(), lab, Store(tmp_path), say=quiet)
    assert "10shot" not in plain.table.rows[0].numbers
    with_transfer = Store(tmp_path, "shapes?size=32&classes=downstream&length=600")
    assert len(unfinished(list(few().cells(lab)), with_transfer)) == 2
    shown = run_study(few(), lab, with_transfer, say=quiet).table
    assert all(0 <= row.numbers["10shot"] <= 100 for row in shown)
    assert [r.numbers["val_loss"] for r in shown] == [r.numbers["val_loss"] for r in plain.table]
    assert list(shown.rows[0].numbers)[:3] == ["top1", "top5", "10shot"]


def test_estimates_say_where_their_rate_comes_from(tmp_path: Path) -> None:
    """Assumed before anything ran, measured afterwards; done jobs cost nothing."""
    lab, store = make_lab(LabOptions(scale="tiny", seeds=1)), Store(tmp_path)
    before = estimate(few(), lab, store)
    assert (before.jobs, before.measured) == (2, False)
    assert before.flops == pytest.approx(sum(cell.job.flops() for cell in few().cells(lab)))
    assert "assumed" in str(before)
    run_study(few(), lab, store, say=quiet)
    after = estimate(few(), lab, store)
    assert (after.jobs, after.flops, after.measured) == (0, 0.0, True)
    assert "about 2h05m one after another" in str(replace(after, flops=7500.0, rate=1.0))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a name it lists the studies; a wrong name gets the nearest; a dry run makes nothing."""
    assert main(["study"]) == 2
    assert "ablations" in capsys.readouterr().out
    assert main(["study", "ablation"]) == 2
    assert "did you mean 'ablations'?" in capsys.readouterr().err
    assert main(["study", "ablations", "--seeds", "0"]) == 2
    assert "--seeds must be at least 1" in capsys.readouterr().err
    out = tmp_path / "out"
    assert main(["study", "ablations", "--scale", "tiny", "--seeds", "2", "--dry-run", "--out", str(out)]) == 0
    assert "16 cells, 16 jobs to do" in capsys.readouterr().out
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (LabOptions(scale="small", recipe="quickstart", seeds=1), "Recipe quickstart, 1 seed, data characters"),
        (LabOptions(scale="tiny", seeds=2), "Scale tiny, 2 seeds, data shapes"),
    ],
)
def test_the_verdict_says_what_was_run(tmp_path: Path, options: LabOptions, words: str) -> None:
    """The recipe or the scale, and how many seeds."""
    run_study(study(Note("a")), make_lab(options), Store(tmp_path))
    assert words in (tmp_path / "notes" / "verdict.md").read_text()


AT_ONCE = """
import os, signal, sys
if "spawn_main" in " ".join(sys.orig_argv):
    os.kill(os.getpid(), signal.SIGINT)
"""


def test_interrupt_of_workers_that_start(tmp_path: Path) -> None:
    """Ctrl-C in the first moment of the processes for jobs stops the study without a traceback of their imports."""
    (tmp_path / "sitecustomize.py").write_text(AT_ONCE)  # Python runs it before anything else
    command = [sys.executable, "-m", "softmoe", "study", "placement", "--scale", "tiny", "--jobs", "2"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out")], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (130, "")
    assert "the same command goes on from here" in done.stdout
    assert not list((tmp_path / "out").glob("runs/*/result.json"))
