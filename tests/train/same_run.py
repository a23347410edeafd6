"""Break a run, and compare two runs bit for bit."""

from typing import Any

import torch
from torch import nn

from softmoe.storage.checkpoint import read_checkpoint
from softmoe.train import TrainConfig
from softmoe.train.folder import RunFolder
from softmoe.train.log import read_metrics
from softmoe.train.objectives import make_objective


class Crash(Exception):
    pass


def crash_at(config: TrainConfig, step: int):
    """An objective that works and fails at its call number `step` of this process."""
    real, calls = make_objective(config.objective), [0]

    def objective(model: nn.Module, batch: Any):
        calls[0] += 1
        if calls[0] == step:
            raise Crash
        return real(model, batch)

    return objective


def final_state(config: TrainConfig) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Weights and moments of the last checkpoint, and the metrics without times."""
    folder = RunFolder.of(config)
    tensors = read_checkpoint(folder.checkpoints / "last").tensors
    flat = {f"{file}/{name}": t for file, named in tensors.items() for name, t in named.items()}
    lines = [{k: v for k, v in r.items() if k != "device_seconds"} for r in read_metrics(folder.metrics)]
    return flat, lines


def assert_same_run(a: TrainConfig, b: TrainConfig) -> None:
    (tensors_a, lines_a), (tensors_b, lines_b) = final_state(a), final_state(b)
    assert tensors_a.keys() == tensors_b.keys()
    for name, tensor in tensors_a.items():
        assert torch.equal(tensor, tensors_b[name]), name
    assert lines_a == lines_b
