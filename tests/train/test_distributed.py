"""What several processes cannot share is refused before anything is built."""

from dataclasses import replace

import pytest

from softmoe.models import ViTConfig
from softmoe.train import OptimSection, TrainConfig, distributed
from softmoe.train.config import ParallelSection
from softmoe.train.distributed import Team, process_team

CONFIG = TrainConfig(optim=OptimSection(clip_norm=None))


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            replace(CONFIG, optim=OptimSection(clip_norm=None, in_backward=True)),
            r"optim\.in_backward is for one process",
        ),
        (replace(CONFIG, accumulate=3), "accumulate must divide the .* images of a process, got 3"),
    ],
)
def test_refused(config, sentence):
    """One sentence each, on two processes; one process alone takes them all."""
    with pytest.raises(ValueError, match=sentence):
        Team(world=2).check(config, ViTConfig())
    Team().check(config, ViTConfig())


@pytest.mark.parametrize("device", ["cuda:1", "mps"])
def test_a_device_that_processes_cannot_share_is_refused(device, monkeypatch):
    """Each of several processes takes a GPU of its own, so none can be named."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=f"each takes a GPU of its own: --device cuda .or cpu., not {device}"):
        process_team(ParallelSection(), device).__enter__()


def test_a_process_takes_its_gpu_before_it_meets_the_others(monkeypatch):
    """NCCL takes the current device: all would meet on the first one."""
    happened = []
    for name, value in {"WORLD_SIZE": "2", "RANK": "5", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "choose_device", lambda name, place: happened.append((name, place)))
    monkeypatch.setattr(distributed, "fresh_store", lambda patience: happened.append("meet") or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        process_team(ParallelSection(), "cuda").__enter__()
    assert happened == [("cuda", 1), "meet"]
