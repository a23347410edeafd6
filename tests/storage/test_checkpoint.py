import errno
import json
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from saved_models import killed, killed_between_renames

from softmoe.storage import CheckpointSection, CheckpointStore, checkpoint
from softmoe.storage.checkpoint import (
    BrokenCheckpoint,
    Snapshot,
    copy_tensors,
    optimizer_targets,
    optimizer_tensors,
    read_checkpoint,
    restore,
    write_checkpoint,
)
from softmoe.storage.weights import Spec
from softmoe.train.config import OptimSection
from softmoe.train.optim import make_optimizer, set_learning_rate


def snapshot(step: int, size: int = 10) -> Snapshot:
    tensors = {"model": {"w": torch.arange(float(size)) + step}, "optimizer": {"w/step": torch.tensor(float(step))}}
    return Snapshot(step, tensors, {"state": {"step": step}, "config": {"width": 3}})


def store(folder: Path, said: list[str] | None = None, **settings) -> CheckpointStore:
    report = (lambda line: None) if said is None else said.append
    return CheckpointStore(folder, CheckpointSection(**settings), report)


def same(a: Snapshot, b: Snapshot) -> bool:
    return (a.step, a.texts) == (b.step, b.texts) and all(
        torch.equal(a.tensors[file][name], b.tensors[file][name]) for file in a.tensors for name in a.tensors[file]
    )


def test_round_trip(tmp_path: Path):
    """What is read equals what was written, and the folder is a saved model with the files the manifest names."""
    path = write_checkpoint(tmp_path, snapshot(7))
    assert path == tmp_path / "step_00000007"
    assert same(read_checkpoint(path), snapshot(7))
    names = {"model.safetensors", "optimizer.safetensors", "state.json", "config.json", "manifest.json"}
    assert {p.name for p in path.iterdir()} == names
    assert not list(tmp_path.glob(".*"))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [cut, flip, Path.unlink, lambda p: p.write_bytes(b"")])
@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
def test_a_broken_newest_is_reported_and_the_one_before_used(tmp_path: Path, file: str, harm):
    """Cut, changed, missing or empty, any file: one line says so, and the run continues from the older checkpoint."""
    for step in (2, 4):
        write_checkpoint(tmp_path, snapshot(step))
    harm(tmp_path / "step_00000004" / file)
    said: list[str] = []
    found = store(tmp_path, said).latest()
    assert found is not None
    assert same(found, snapshot(2))
    assert len(said) == 1
    assert "step_00000004" in said[0]
    assert "broken-step_00000004" in said[0]
    write_checkpoint(tmp_path, snapshot(4))
    found = store(tmp_path).latest()
    assert found is not None
    assert found.step == 4


def test_a_kill_while_a_checkpoint_is_replaced_loses_nothing(tmp_path: Path):
    """Between the two renames neither folder has the name: the old one gets it back, and the rest is removed."""
    path = write_checkpoint(tmp_path, snapshot(2))
    killed_between_renames(path)
    assert not path.exists()
    found = store(tmp_path).latest()
    assert found is not None
    assert same(found, snapshot(2))
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_kill_while_a_checkpoint_is_removed_does_not_bring_it_back(tmp_path: Path):
    """A checkpoint whose removal was killed may be half gone: the next run removes the rest of it."""
    path = write_checkpoint(tmp_path, snapshot(2))
    killed(
        "shutil.rmtree = lambda path, **how: os._exit(9) if path.exists() else None",
        f"files.remove_folder(Path({str(path)!r}))",
    )
    assert not path.exists()
    assert store(tmp_path).latest() is None
    assert not list(tmp_path.iterdir())


def test_no_readable_checkpoint_at_all_is_an_error(tmp_path: Path):
    """A run that has checkpoints never silently starts again from nothing."""
    cut(write_checkpoint(tmp_path, snapshot(2)) / "model.safetensors")
    with pytest.raises(ValueError, match="none of the 1 checkpoints"):
        store(tmp_path).latest()


def test_an_empty_folder_is_a_new_run(tmp_path: Path):
    """Also one with only the remains of a killed first save, which are swept away."""
    assert store(tmp_path / "nothing").latest() is None
    (tmp_path / ".partial-step_00000002-1234").mkdir()
    assert store(tmp_path).latest() is None
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=15)
@given(
    st.integers(1, 3),
    st.none() | st.integers(1, 5),
    st.lists(st.integers(1, 30), min_size=1, max_size=8, unique=True).map(sorted),
    st.data(),
)
def test_what_is_kept(keep_last: int, keep_every: int | None, steps: list[int], data: st.DataObject):
    """The last ones, the multiples, and the best; the links point to the newest and to the best."""
    best = data.draw(st.sampled_from(steps))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kept = store(folder, keep_last=keep_last, keep_every=keep_every, asynchronous=False)
        for step in steps:
            kept.save(snapshot(step, 1), best=best if step >= best else None)
        multiples = {step for step in steps if keep_every and step % keep_every == 0}
        assert set(kept.steps()) == set(steps[-keep_last:]) | multiples | {best}
        assert read_checkpoint(folder / "last").step == steps[-1]
        assert read_checkpoint(folder / "best").step == best


def test_training_may_go_on_while_a_save_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The snapshot is a copy: weights changed before the writer has begun are not in the file."""
    weight = torch.ones(4)
    go = threading.Event()
    real = checkpoint.write_tensors
    monkeypatch.setattr(checkpoint, "write_tensors", lambda *a: go.wait(10) and real(*a))
    kept = store(tmp_path)
    kept.save(Snapshot(1, {"model": copy_tensors({"w": weight})}, {"state": {}}))
    weight.zero_()
    go.set()
    kept.wait()
    assert read_checkpoint(tmp_path / "step_00000001").tensors["model"]["w"].tolist() == [1.0] * 4


@pytest.mark.parametrize("file", ["model", "optimizer"])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, asynchronous: bool):
    """A save that fails half way says so, leaves nothing behind, keeps the last good one; the next may succeed."""
    said: list[str] = []
    kept = store(tmp_path, said, asynchronous=asynchronous)
    kept.save(snapshot(2))
    kept.wait()
    real = checkpoint.write_tensors

    def full(path: Path, tensors):
        if path.stem == file:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, tensors)

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    kept.save(snapshot(4))
    kept.wait()
    what = f"No space left on device: {str(tmp_path / 'step_00000004')!r}"
    assert said == [f"could not save step 4: [Errno 28] {what}; training goes on, the last good one is of step 2"]
    assert {p.name for p in tmp_path.iterdir()} == {"step_00000002", "last"}
    assert kept.failed_saves == 1
    monkeypatch.undo()
    kept.save(snapshot(6))
    kept.wait()
    assert kept.steps() == [2, 6]
    assert len(said) == 1


@pytest.mark.parametrize("asynchronous", [False, True])
def test_failures_that_are_no_matter_of_the_disk(tmp_path: Path, asynchronous: bool):
    """An error of a device, found when the copies arrive, is raised in training, also from the writer's thread."""

    def broken() -> bool:
        raise RuntimeError("the device is gone")

    ours = store(tmp_path, asynchronous=asynchronous)
    lost = Snapshot(1, snapshot(1).tensors, snapshot(1).texts, broken)
    with pytest.raises(RuntimeError, match="the device is gone"):  # noqa: PT012
        ours.save(lost)
        ours.wait()
    ours.save(snapshot(2))
    ours.wait()
    assert ours.steps() == [2]


def test_optimizer_state_by_name(tmp_path: Path):
    """Moments and step counts return to the parameters of the same name; unknown names are refused."""

    def make(steps: int):
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 2)
        optimizer = make_optimizer(model, OptimSection())
        set_learning_rate(optimizer, 0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        return model, optimizer

    model, trained = make(3)
    plain, fresh = make(0)
    tensors = {"model": copy_tensors(model.state_dict()), "optimizer": copy_tensors(optimizer_tensors(trained))}
    restore(read_checkpoint(write_checkpoint(tmp_path, Snapshot(3, tensors, {}))), plain, fresh)
    again = optimizer_tensors(fresh)
    for name, value in optimizer_tensors(trained).items():
        assert torch.equal(again[name], value), name
    assert set(again) == {f"{p}/{k}" for p in ("weight", "bias") for k in ("step", "exp_avg", "exp_avg_sq")}
    with pytest.raises(ValueError, match="optimizer state of 'other', which this run does not train"):
        optimizer_targets({"other/step": Spec(torch.float32, ())}, fresh)


def test_nothing_is_pickled(tmp_path: Path):
    """Every file is safetensors or JSON."""
    path = write_checkpoint(tmp_path, snapshot(1))
    assert {p.suffix for p in path.iterdir()} == {".safetensors", ".json"}
    for file in path.glob("*.json"):
        json.loads(file.read_text())
    with pytest.raises(BrokenCheckpoint):
        read_checkpoint(tmp_path / "nowhere")
