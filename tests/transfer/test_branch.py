from dataclasses import replace
from pathlib import Path

import pytest
import torch
from train.conftest import config_maker

from softmoe.data import train_tokenizer
from softmoe.storage.checkpoint import read_checkpoint
from softmoe.train import TextSection, TrainConfig, train
from softmoe.train.folder import RunFolder
from softmoe.train.log import read_metrics
from softmoe.train.optim import make_schedule
from softmoe.transfer.finetune import branch, branch_config


def files(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A finished run of 8 steps that keeps every second checkpoint; a branch does not change it."""
    changes = {"schedule.kind": "rsqrt", "schedule.warmup": 1, "schedule.timescale": 2, "checkpoint.keep_every": 2}
    config = config_maker(tmp_path_factory.mktemp("branch"))(steps=8, run_name="long", **changes)
    train(config)
    return config


def test_a_branch_is_the_run_that_cools_down(long, make_config):
    """Branching at step 4 for 3 steps equals, bit for bit, a run that was planned to cool down from step 4 on."""
    before = files(RunFolder.of(long).path)
    cooled = branch(RunFolder.of(long).checkpoints / "step_00000004", 3, "short")
    assert train(cooled).step == 7
    assert files(RunFolder.of(long).path) == before
    planned = replace(long, run_name="planned", steps=7, schedule=replace(long.schedule, cooldown=3))
    train(planned)
    ours, theirs = (read_checkpoint(RunFolder.of(c).checkpoints / "last").tensors for c in (cooled, planned))
    for file, tensors in theirs.items():
        for name, tensor in tensors.items():
            assert torch.equal(ours[file][name], tensor), name
    steps = [r["step"] for r in read_metrics(RunFolder.of(cooled).metrics)]
    assert steps == sorted(steps)
    assert steps[-1] == 7


def test_a_branch_can_be_started_again(long):
    """Asked for twice, the branch continues: nothing is copied over what it has done."""
    checkpoint = RunFolder.of(long).checkpoints / "step_00000002"
    train(branch(checkpoint, 2))
    config = branch(checkpoint, 2)
    assert config.run_name == "long-2-2"
    before = files(RunFolder.of(config).checkpoints)
    assert train(config).step == 4
    assert files(RunFolder.of(config).checkpoints) == before


def test_a_branch_has_the_tokenizer_of_its_run(make_config, tmp_path: Path):
    """As the run itself it goes on where the file that was given is gone."""
    file = tmp_path / "mine.json"
    file.write_bytes(train_tokenizer(["a red star", "a blue ring"], 300).data)
    text = TextSection(size="ti", width=16, depth=1, heads=2, mlp_dim=16, tokenizer=str(file))
    config = replace(make_config(steps=2, **{"data.train": "shapes?size=16&length=12"}), text=text)
    folder = train(config).folder
    file.unlink()
    branched = train(branch(folder.checkpoints / "step_00000002", 1)).folder
    assert (branched.path / "tokenizer.json").read_bytes() == (folder.path / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("kind", ["rsqrt", "linear", "cosine", "constant"])
def test_the_past_keeps_its_rates(make_config, kind: str):
    """Whatever the schedule, the rates before the branch are those of the run, and the last is on the way to zero."""
    old = make_config(steps=20, **{"schedule.kind": kind, "schedule.warmup": 2})
    new = branch_config(old, 10, 5, "new", old.runs)
    was, now = make_schedule(old.schedule, old.steps), make_schedule(new.schedule, new.steps)
    assert [was(t) for t in range(11)] == [now(t) for t in range(11)]
    assert now(14) == pytest.approx(was(10) / 5)
    assert now(15) == 0.0


def test_wrong_branches(long, make_config, tmp_path: Path):
    """No checkpoint, no cooldown, too early, too late: one sentence each."""
    checkpoints = RunFolder.of(long).checkpoints
    with pytest.raises(ValueError, match="at least 1 step, got 0"):
        branch(checkpoints / "step_00000004", 0)
    with pytest.raises(ValueError, match="not a checkpoint in the folder of a run"):
        branch(tmp_path / "nowhere" / "checkpoints" / "step_00000004", 3)
    warming = make_config(steps=4, run_name="warming", **{"schedule.warmup": 3})
    train(warming)
    with pytest.raises(ValueError, match="step 2 is still in the warm-up of 3"):
        branch(RunFolder.of(warming).checkpoints / "step_00000002", 3)
    cooling = make_config(steps=4, run_name="cooling", **{"schedule.cooldown": 3})
    train(cooling)
    with pytest.raises(ValueError, match="already in the cooldown, which began at 1"):
        branch(RunFolder.of(cooling).checkpoints / "step_00000002", 3)
