"""Image-text training on two ranks is that of one process: the loss compares all pairs of all ranks."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel.ranks import run_ranks, start_ranks
from parallel.trouble import make_config
from torch import Tensor
from two_towers import two_towers

from softmoe import parallel
from softmoe.models import TwoTower
from softmoe.parallel.reduce import gather_rows
from softmoe.train import TextSection, TrainConfig, train
from softmoe.train.objectives import contrastive_loss


def whole(tensor: Tensor) -> Tensor:
    return parallel.whole(tensor.detach()).clone()


def gradients(kind: str, rank: int = 0, world: int = 1, mesh: Any = None) -> dict[str, Tensor]:
    model = two_towers(bias_init=-2.0 if kind == "sigmoid" else None).double().train()
    if mesh is not None:
        model = parallel.apply(model, mesh)
    assert isinstance(model, TwoTower)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(8, 3, 16, 16, generator=generator, dtype=torch.float64).chunk(world)[rank]
    tokens = torch.randint(2, 200, (8, 6), generator=generator).chunk(world)[rank]
    loss = contrastive_loss(model(images, tokens), kind)
    loss.backward()
    found = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return found | {"loss": parallel.mean_over_ranks(loss.detach())}


def gradients_on_ranks(rank: int, cases: list[tuple[str, int, int]]) -> list[dict[str, Tensor]]:
    return [gradients(kind, rank, 2, parallel.make_mesh(expert, shard)) for kind, expert, shard in cases]


def gather_and_weigh(rank: int) -> tuple[Tensor, Tensor]:
    """Rows of all, and the gradient of a different sum on each rank."""
    rows = (torch.arange(4.0).view(2, 2) + 10 * rank).requires_grad_()
    together = gather_rows(rows)
    (together * (rank + 1)).sum().backward()
    assert rows.grad is not None
    return together.detach(), rows.grad


def test_two_ranks_have_the_loss_and_gradients_of_one():
    """Both losses, every parameter of both towers, scale and bias, with experts owned by ranks and shards."""
    cases = [("sigmoid", 1, 1), ("softmax", 1, 1), ("sigmoid", 2, 2)]
    for results in run_ranks(2, gradients_on_ranks, cases):
        for (kind, _, _), found in zip(cases, results, strict=True):
            expected = gradients(kind)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=f"{kind} {name}")


@pytest.mark.slow
def test_gathered_gradients_are_added_up():
    """Each row's gradient is the sum of what all ranks did with it."""
    for rank, (together, gradient) in enumerate(run_ranks(2, gather_and_weigh)):
        assert together[:, 0].tolist() == [0.0, 2.0, 10.0, 12.0]
        assert gradient.tolist() == [[3.0, 3.0], [3.0, 3.0]], rank
    rows = torch.ones(2, 3)
    assert gather_rows(rows) is rows


def text_config(runs: Path, **more: Any) -> TrainConfig:
    config = make_config(runs, **more)
    text = TextSection(size="ti", width=16, depth=2, heads=2, mlp_dim=16, vocab_size=400, mask_padding=True)
    return replace(config, text=text)


def train_rank(rank: int, world: int, config: TrainConfig) -> dict[str, float]:
    return train(config).numbers


@pytest.mark.slow
def test_a_run_on_two_processes_is_that_of_one(tmp_path):
    """The loop with average, parts and a sharded model: the same losses, in training and validation."""
    alone = train(text_config(tmp_path / "one")).folder
    results = start_ranks(2, train_rank, text_config(tmp_path / "two", expert=2, shard=2))
    for rank, (_, error) in enumerate(results):
        assert error is None, f"rank {rank}:\n{error}"
    lines = [
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (alone.path, tmp_path / "two" / "run")
    ]
    for one, two in zip(*lines, strict=True):
        for key in ("step", "loss", "grad_norm", "flops", "val/top1", "val/loss"):
            assert one.get(key, 0) == pytest.approx(two.get(key, 0), rel=1e-4), key
    from softmoe.train.folder import RunFolder, write_model

    assert write_model(RunFolder(tmp_path / "two" / "run")).towers is not None
