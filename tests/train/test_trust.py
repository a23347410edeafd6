"""Bad numbers, a full disk and a killed data worker: nothing good is replaced, and what is said is true."""

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from train.same_run import assert_same_run

from softmoe.cli import main
from softmoe.data import WorkerDied
from softmoe.storage.checkpoint import read_checkpoint
from softmoe.train import Diverged, TrainConfig, train
from softmoe.train.folder import RunFolder, write_model
from softmoe.train.log import read_metrics, scan_metrics
from softmoe.train.objectives import make_objective
from softmoe.train.run import TrainState


def steps_of(config: TrainConfig) -> list[int]:
    return sorted(int(path.name[5:]) for path in RunFolder.of(config).checkpoints.glob("step_*"))


def spoiled(config: TrainConfig, first: int):
    """An objective whose loss is not finite from this call on."""
    real, calls = make_objective(config.objective), [0]

    def objective(model: nn.Module, batch: Any):
        calls[0] += 1
        loss, numbers = real(model, batch)
        return (loss * math.nan if calls[0] >= first else loss), numbers

    return objective


def test_bad_steps_replace_no_good_checkpoint(make_config):
    """Twenty bad steps, each of which would be saved: the last two good ones stay, the links and the error name a good
    one, and the run goes on from it."""
    config = make_config(steps=40, max_bad_steps=20, **{"checkpoint.every": 1, "evaluation.every": 1})
    with pytest.raises(Diverged, match=r"last good checkpoint is .*step_00000004"):
        train(config, objective=spoiled(config, 5))
    assert {3, 4} <= set(steps_of(config)) <= {1, 2, 3, 4}
    folder = RunFolder.of(config)
    assert read_checkpoint(folder.checkpoints / "last").step == 4
    assert read_checkpoint(folder.checkpoints / "best").step <= 4
    assert train(make_config(steps=6, **{"checkpoint.every": 1})).step == 6


def test_a_run_that_ends_in_bad_steps_says_so(make_config, capsys: pytest.CaptureFixture):
    """Too few bad steps to stop: the end is not saved, and the result tells of it."""
    config = make_config(steps=6, max_bad_steps=99)
    result = train(config, objective=spoiled(config, 5))
    assert steps_of(config)[-1] == 4
    assert "the last 2 steps gave no finite loss or gradient" in result.problems[0]
    assert "newest checkpoint is of step 4" in result.problems[0]


def test_one_bad_step_at_the_end_loses_nothing(make_config):
    """The last step is skipped, and nothing was saved before: what the steps before it learned is saved with it."""
    config = make_config(steps=6, **{"checkpoint.every": 1000})
    result = train(config, objective=spoiled(config, 6))
    assert (result.problems, steps_of(config)) == ((), [6])
    shorter = make_config(steps=5, run_name="shorter", **{"checkpoint.every": 1000})
    train(shorter)
    saved, expected = (read_checkpoint(RunFolder.of(c).checkpoints / "last") for c in (config, shorter))
    for name, value in expected.tensors["model"].items():
        assert torch.equal(saved.tensors["model"][name], value), name


def test_weights_that_are_not_finite_are_neither_saved_nor_exported(make_config):
    """An update that spoils the weights ends the run at the next save; a spoiled checkpoint becomes no model."""
    config = make_config(steps=6)
    real, calls = make_objective(config.objective), [0]

    def objective(model: nn.Module, batch: Any):
        calls[0] += 1
        loss, numbers = real(model, batch)
        if calls[0] == 4:
            with torch.no_grad():
                next(p for name, p in model.named_parameters() if name == "head.bias").fill_(math.inf)
        return loss, numbers

    with pytest.raises(Diverged, match=r"weights are not finite numbers; the last good checkpoint is .*step_00000002"):
        train(config, objective=objective)
    assert steps_of(config) == [2]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optim.kernel_decay", math.nan),
        ("optim.head_decay", -1.0),
        ("optim.decay_patterns", (("head", math.nan),)),
        ("optim.lr_patterns", (("head", -1.0),)),
        ("optim.freeze", 1.5),
        ("optim.clip_norm", -1.0),
        ("optim.clip_norm", 0.0),
        ("optim.clip_norm", math.nan),
        ("optim.beta2", 1.0),
        ("optim.expert_momentum", 1.0),
        ("optim.eps", -1e-8),
        ("schedule.peak", -1e-3),
        ("schedule.peak", math.inf),
        ("schedule.end", -1.0),
        ("objective.auxiliary_weight", math.nan),
        ("data.max_broken", 2.0),
        ("evaluation.every", 0),
        ("threads", 0),
        ("threads", 10**20),
        ("data.workers", -1),
        ("data.workers", 10**20),
        ("data.prefetch", 0),
        ("data.prefetch", 10**20),
        ("ema", math.nan),
    ],
)
def test_settings_that_cannot_train(make_config, key: str, value: Any):
    """Negative and infinite rates, decays, norms and factors are refused by name before anything is opened."""
    with pytest.raises(ValueError, match=key.replace(".", r"\.")):
        make_config(**{key: value}).check()


@pytest.mark.parametrize("value", [-1, 10**20, 10**400], ids=lambda value: str(value)[:9])
@pytest.mark.parametrize(
    "key",
    [
        *("width", "depth", "mlp_dim", "patch_size", "registers", "num_experts", "expert_dim", "kept_dim"),
        "representation_size",
    ],
)
def test_sizes_that_no_model_has(make_config, key: str, value: int):
    """A model that could not be opened again is not built: its sizes are refused before any memory is taken."""
    with pytest.raises(ValueError, match=key):
        train(make_config(**{f"model.{key}": value, "model.keep_mlp": True}))


@pytest.mark.parametrize("name", ["", "$HOME", "_run", "-run", ".run", "a/b", "a b", "run\n", "a$b"])
def test_names_of_runs(make_config, name: str):
    """A run's name is letters, digits, dots, dashes and underscores, and begins with a letter or digit."""
    with pytest.raises(ValueError, match="run_name must be a plain folder name"):
        make_config(run_name=name).check()
    make_config(run_name="soft_s16-1.5").check()


def test_a_killed_data_worker_leaves_a_checkpoint(make_config):
    """The steps made so far are saved, the error is a sentence, and the run continues to the same bits."""
    changes = {"steps": 6, "checkpoint.every": 100, "data.workers": 1, "data.prefetch": 1}
    config, whole = make_config(run_name="hit", **changes), make_config(run_name="whole", **changes)
    real, calls = make_objective(config.objective), [0]

    def objective(model: nn.Module, batch: Any):
        import multiprocessing

        calls[0] += 1
        if calls[0] == 3:
            for worker in multiprocessing.active_children():
                assert worker.pid is not None
                os.kill(worker.pid, signal.SIGKILL)
                worker.join()
        return real(model, batch)

    with pytest.raises(WorkerDied, match="A data worker was stopped from outside"):
        train(config, objective=objective)
    assert steps_of(config)[-1] >= 3
    assert train(config).step == 6
    train(whole)
    assert_same_run(config, whole)


def test_a_finished_run_says_so(make_config, capfd: pytest.CaptureFixture):
    """Running it again trains nothing, says that it is finished, and has its scores."""
    config = make_config()
    first = train(config)
    capfd.readouterr()
    again = train(config)
    assert again.numbers == first.numbers != {}
    said = capfd.readouterr().err
    assert f"{RunFolder.of(config).path} is finished: all 6 steps are done" in said
    assert "resuming" not in said


def test_a_damaged_line_loses_no_other(make_config, capfd: pytest.CaptureFixture):
    """It is counted and left out by readers and by a run that goes on; the lines after it stay."""
    config = make_config()
    train(config)
    path = RunFolder.of(config).metrics
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], '{"step": 4, "lo\x00\n', "[1]\n", *lines[1:], '{"step": 6']))
    rows, damaged = scan_metrics(path)
    assert (rows, damaged) == ([json.loads(line) for line in lines], 2)
    assert main(["report", str(RunFolder.of(config).path)]) == 0
    assert "2 damaged lines of metrics.jsonl are left out" in capfd.readouterr().out
    train(config)
    assert path.read_text() == "".join(lines)


def test_an_objectives_own_numbers_are_logged(make_config):
    """As means over the steps since the last line, parts of a batch included."""
    config = make_config(accumulate=2)
    real, calls = make_objective(config.objective), [0]

    def objective(model: nn.Module, batch: Any):
        calls[0] += 1
        return real(model, batch)[0], {"calls": torch.tensor(float(calls[0]))}

    train(config, objective=objective)
    lines = [row for row in read_metrics(RunFolder.of(config).metrics) if "loss" in row]
    assert [row["objective/calls"] for row in lines] == [2.5, 6.5, 10.5]


def options(tmp_path: Path) -> list[str]:
    flags = {
        "runs": tmp_path, "steps": 4, "checkpoint.every": 2, "evaluation.every": 2, "evaluation.examples": 8,
        "data.batch-size": 4, "data.workers": 0, "schedule.warmup": 0, "schedule.cooldown": 0, "log.quiet": True,
        "model.width": 16, "model.depth": 2, "model.heads": 2, "model.mlp-dim": 16, "model.num-experts": 4,
        "model.blocks": 1,
    }  # fmt: skip
    return [word for key, value in flags.items() for word in (f"--{key}", str(value))]


def test_what_is_printed_is_of_what_was_exported(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture):
    """The last save fails: the model, its step and its numbers are those of the checkpoint before, and the exit code
    is not zero. The same command then ends with the last step and code 0, and prints the report's place."""
    from softmoe.storage import store

    write = store.write_checkpoint

    def full(folder: Path, snapshot: Any, *more: Any):
        if snapshot.step == 4:
            raise OSError(28, "No space left on device")
        return write(folder, snapshot, *more)

    monkeypatch.setattr(store, "write_checkpoint", full)
    command = ["train", "quickstart", *options(tmp_path)]
    assert main(command) == 1
    shown = capsys.readouterr()
    assert "step 4 could not be saved; the newest checkpoint is of step 2" in shown.err
    rows = dict(line.split(maxsplit=1) for line in shown.out.splitlines() if len(line.split(maxsplit=1)) == 2)
    assert rows["step"] == "2"
    saved = json.loads((tmp_path / "quickstart" / "checkpoints" / "last" / "state.json").read_text())
    assert saved["step"] == 2
    assert rows["val/loss"] == f"{saved['progress']['evaluation']['numbers']['val/loss']:.4f}"
    monkeypatch.undo()
    assert main(command) == 0
    out = capsys.readouterr().out
    assert str(tmp_path / "quickstart" / "report.html") in out
    assert (tmp_path / "quickstart" / "report.html").is_file()
    assert write_model(RunFolder(tmp_path / "quickstart")).folder.is_dir()


@pytest.mark.parametrize(
    "said",
    [
        5,
        {"steps": 3},
        {"step": "3"},
        {"step": True},
        {"loss_sum": None},
        {"evaluating": 1},
        {"best": 7},
        {"skipped": 1.5},
        {"skipped": -5},
        {"loss_sum": math.nan},
        {"device_seconds": math.inf},
        {"best": {"step": "x"}},
        {"best": {}},
        {"best": {"step": 1}},
        {"best": {"step": 1, "value": "x"}},
        {"evaluation": {}},
        {"evaluation": {"step": 1, "numbers": 5}},
        {"evaluation": {"step": 1, "numbers": {"val/loss": "x"}}},
        {"objective_sums": {"x": "y"}},
        {"objective_sums": {"x": True}},
        {"good_steps": 4},
        {"skipped": 10**400},
        {"loss_sum": 10**400},
        {"stale": 10**9},
        {"best": {"step": 1, "value": 0.5, "loss": "x"}},
    ],
    ids=lambda said: str(said)[:60],
)
def test_progress_of_the_wrong_kind_is_refused(said: Any):
    """A checkpoint's progress holds what a run counts, each in its own kind, or it is not used at all."""
    with pytest.raises(ValueError, match=r"state\.json"):
        TrainState.read({"step": 3} | said if isinstance(said, dict) else said)
    with pytest.raises(ValueError, match=r"state\.json: progress.step cannot be None"):
        TrainState.read({})
    good = TrainState(step=3, loss_sum=2.5, best={"step": 1, "value": 0.5})
    assert TrainState.read(vars(good)) == good
