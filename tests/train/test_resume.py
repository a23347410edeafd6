import json
import os
import re
import shlex
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from train.same_run import Crash, assert_same_run, crash_at, final_state

from softmoe.cli import main
from softmoe.data import Feed, WorkerDied
from softmoe.storage.checkpoint import read_checkpoint, write_texts
from softmoe.storage.files import FileFacts
from softmoe.train import train
from softmoe.train.folder import RunFolder, write_model
from softmoe.train.loop import resume
from softmoe.train.objectives import make_objective
from softmoe.train.run import build


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model.router": "tokens_choice", "model.dropout": 0.2, "data.transform.mixup": 0.3},
        {"ema": 0.5, "optim.name": "sgd", "model.router": "dense", "accumulate": 2},
        {"optim.name": "muon"},
        {"checkpoint.asynchronous": False, "log.every": 4, "evaluation.every": 3, "model.noise_std": 1.0},
        {"optim.in_backward": True, "optim.clip_norm": None, "optim.states": "bfloat16", "ema": 0.5},
    ],
)
def test_a_crashed_run_ends_with_the_same_bits(make_config, changes: dict[str, Any]):
    """Weights, moments, average and metrics after crashes at steps 2, 4 and 5 equal those of an uninterrupted run."""
    whole, broken = make_config(run_name="whole", **changes), make_config(run_name="broken", **changes)
    assert train(whole).step == 6
    for calls in (2, 3, 3):
        with pytest.raises(Crash):
            train(broken, objective=crash_at(broken, calls * broken.accumulate))
    assert train(broken).step == 6
    assert_same_run(whole, broken)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_run_continues(make_config, number: signal.Signals):
    """The step is finished, saved and named in the result; the handlers are put back; the end is the same."""
    whole, stopped = make_config(run_name="whole"), make_config(run_name="stopped")
    train(whole)
    real, before = make_objective(stopped.objective), signal.getsignal(number)

    def objective(model: nn.Module, batch: Any):
        os.kill(os.getpid(), number)
        return real(model, batch)

    for step in (1, 2, 3):
        result = train(stopped, objective=objective)
        assert (result.step, result.signal) == (step, number)
    assert signal.getsignal(number) is before
    assert train(stopped).signal is None
    assert_same_run(whole, stopped)


def test_a_signal_that_ends_the_workers_too(make_config, monkeypatch):
    """Schedulers stop all processes of a job together: that is a stop, not a lost worker, and the run continues."""
    whole, stopped = make_config(run_name="whole"), make_config(run_name="stopped")
    train(whole)
    real, fetch = make_objective(stopped.objective), Feed.fetch
    ended: list[bool] = []

    def objective(model: nn.Module, batch: Any):
        os.kill(os.getpid(), signal.SIGTERM)
        ended.append(True)
        return real(model, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Feed, "fetch", lambda feed: WorkerDied("killed") if ended else fetch(feed))
        result = train(stopped, objective=objective)
    assert (result.step, result.signal) == (1, signal.SIGTERM)
    train(stopped)
    assert_same_run(whole, stopped)


def test_a_second_signal_stops_at_once(make_config):
    """Ctrl-C twice does not wait for the step."""
    config = make_config()

    def objective(model: nn.Module, batch: Any):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("not reached")

    with pytest.raises(KeyboardInterrupt):
        train(config, objective=objective)


def test_a_finished_run_is_left_alone(make_config):
    """Starting it again trains nothing and changes no file of it but the lock."""
    config = make_config()
    train(config)
    folder = RunFolder.of(config).path
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}
    assert train(config, objective=crash_at(config, 1)).step == 6
    assert before == {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def test_a_disk_without_links(make_config, monkeypatch: pytest.MonkeyPatch):
    """A run there continues, and its best checkpoint becomes its model."""
    monkeypatch.setattr(Path, "symlink_to", lambda *_: (_ for _ in ()).throw(OSError("no links here")))
    config = make_config()
    with pytest.raises(Crash):
        train(config, objective=crash_at(config, 4))
    folder = train(config).folder
    assert (folder.checkpoints / "best").is_file()
    assert write_model(folder).provenance["step"] == 6


def test_another_configuration_is_refused_with_the_difference(make_config):
    """Every changed key is shown with both values; logging, saving and evaluation may change."""
    train(make_config(steps=2))
    with pytest.raises(ValueError, match=r"another configuration:\n  seed: 0 -> 1\n  model.width: 16 -> 32\n"):
        train(make_config(steps=2, seed=1, **{"model.width": 32}))
    free = {"log.every": 1, "checkpoint.every": 1, "evaluation.every": 1, "threads": 1, "data.prefetch": 3}
    assert train(make_config(steps=2, **free)).step == 2


def test_an_option_that_is_said_or_left_out_is_the_same(make_config):
    """A router's default goes on with a run that was begun without naming it; another value does not."""
    placed = {"model.router": "placed", "model.num_experts": 2}
    train(make_config(steps=2, **placed))
    assert train(make_config(steps=2, **placed, **{"model.combine_place": True})).step == 2
    with pytest.raises(ValueError, match=r"another configuration:\n  model.combine_place: None -> False\n"):
        train(make_config(steps=2, **placed, **{"model.combine_place": False}))


def test_other_data_are_refused(make_config, tmp_path: Path):
    """The same address with other contents is not the same data."""
    config = make_config(steps=2)
    train(config)
    path = RunFolder.of(config).config
    values = json.loads(path.read_text())
    values["facts"]["train_data"] = "changed"
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="train_data: changed -> "):
        train(config)


def test_a_run_may_be_made_longer_if_its_past_stays(make_config):
    """A constant schedule goes on and ends as if it had been long from the start; a cosine one is refused."""
    train(make_config(steps=3, run_name="longer"))
    long, longer = make_config(steps=6, run_name="long"), make_config(steps=6, run_name="longer")
    train(long)
    train(longer)
    (tensors, _), (others, _) = final_state(long), final_state(longer)
    assert all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())
    train(make_config(steps=3, run_name="cosine", **{"schedule.kind": "cosine"}))
    with pytest.raises(ValueError, match="steps: 3 -> 6") as caught:
        train(make_config(steps=6, run_name="cosine", **{"schedule.kind": "cosine"}))
    found = re.search(r"(softmoe finetune .*) --steps N trains the model of this run further", str(caught.value))
    assert found is not None
    _, *words = shlex.split(found[1])
    small = ["--batch-size", "4", "--workers", "0", "--examples", "8", "--image-size", "16", "--quiet"]
    assert main([*words, "--steps", "2", *small, "--runs", longer.runs, "--run-name", "further"]) == 0
    with pytest.raises(ValueError, match="steps: 3 -> 2\\nuse another run_name, or remove"):
        train(make_config(steps=2, run_name="cosine", **{"schedule.kind": "cosine"}))


def test_lists_for_tuples_are_the_same_run(make_config):
    """Settings made in Python with a list where a tuple is declared continue the run that they began."""
    config = make_config()
    lists = replace(config, model=replace(config.model, blocks=[1]))
    assert train(replace(lists, steps=2)).step == 2
    assert train(lists).step == 6


def test_another_measure_of_the_best_begins_anew(make_config):
    """A run resumed with another evaluation.best does not compare its numbers with those of the measure before."""

    def evaluator(model: nn.Module, batches: Any) -> dict[str, float]:
        return {"high": 0.9, "low": 0.1}

    def run(steps: int, best: str) -> int:
        settings = {"evaluation.every": 2, "evaluation.patience": 1, "evaluation.best": best}
        return train(make_config(steps=steps, **settings), evaluators={"val": evaluator}).step

    assert run(2, "val/high") == 2
    assert run(6, "val/low") == 6


def test_two_processes_in_one_folder_are_refused(make_config):
    """The second one says so instead of mixing two runs."""
    config = make_config()
    RunFolder.of(config).path.mkdir(parents=True)
    child = os.fork()
    if child == 0:  # POSIX locks are per process, so the second one must be one
        try:
            with RunFolder.of(config).locked():
                signal.pause()
        finally:
            os._exit(0)
    try:
        lock = RunFolder.of(config).path / ".lock"
        while not (lock.exists() and lock.read_text()):
            pass
        with pytest.raises(ValueError, match="another process is training in"):
            train(config)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_progress_of_the_loader_is_the_step(make_config):
    """A resumed run asks the loader for the step it is at."""
    config = make_config(steps=4)
    with pytest.raises(Crash):
        train(config, objective=crash_at(config, 4))
    run = build(config, RunFolder.of(config))
    resume(run)
    assert run.done.step == 2
    state = read_checkpoint(run.store.path(2)).texts["state"]
    assert state["data"]["next_step"] == 2
    assert state["config"] == json.loads(json.dumps(config.to_dict()))


@pytest.mark.parametrize(("key", "value"), [("seed", 5), ("schedule.peak", 0.5)])
def test_a_changed_config_json_is_found(make_config, key: str, value: float):
    """A checkpoint knows its own settings: editing the run's config.json does not make others acceptable."""
    config = make_config(steps=2)
    train(config)
    path = RunFolder.of(config).config
    stored = json.loads(path.read_text())
    table = stored["train"]
    for part in key.split(".")[:-1]:
        table = table[part]
    table[key.split(".")[-1]] = value
    path.write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=f"{key}: .* -> {value}"):
        train(make_config(steps=2, **{key: value}))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("seed", 5, "seed of step_00000002: 5 -> 0"),
        ("data", {"next_step": 2, "fingerprint": "0" * 64}, "data of step_00000002: .*0000'} -> "),
        ("data", 7, "none of the 1 checkpoints"),
        ("classes", ["x"], r"classes of step_00000002: \['x'\] -> \["),
        ("classes", [], r"classes of step_00000002: \[\] -> \["),
        ("config", None, "does not say 'config'"),
        ("classes", None, "does not say 'classes'"),
        ("progress", None, "does not say 'progress'"),
    ],
)
def test_a_forged_state_json_is_found(make_config, key: str, value: Any, words: str):
    """Resuming compares a checkpoint's words on its run with the run, also where the hashes were made to agree."""
    config = make_config(steps=2)
    train(config)
    folder = RunFolder.of(config).checkpoints / "step_00000002"
    texts = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json") if path.stem != "manifest"}
    del texts["state"][key]
    if value is not None:
        texts["state"][key] = value
    write_texts(folder, 2, texts, {path.name: FileFacts.of(path) for path in folder.glob("*.safetensors")})
    with pytest.raises(ValueError, match=words):
        train(config)


@pytest.mark.parametrize(("change", "words"), [({"depth": 7}, "another model"), ({"depth": "x"}, "depth")])
def test_a_forged_model_in_a_checkpoint_is_found(make_config, change: dict[str, Any], words: str):
    """The config.json of a checkpoint, by which others open it, describes the model of the run."""
    config = make_config(steps=2)
    train(config)
    folder = RunFolder.of(config).checkpoints / "step_00000002"
    texts = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json") if path.stem != "manifest"}
    texts["config"] |= change
    write_texts(folder, 2, texts, {path.name: FileFacts.of(path) for path in folder.glob("*.safetensors")})
    with pytest.raises(ValueError, match=words):
        train(config)
