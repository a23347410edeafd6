"""Runs with updates during the backward pass, against updates after it."""

from typing import Any

import pytest
import torch
from torch import nn
from train.same_run import final_state

from softmoe.accelerate import buffers
from softmoe.train import train
from softmoe.train.config import TrainConfig
from softmoe.train.objectives import make_objective

INSIDE = {"optim.in_backward": True, "optim.clip_norm": None}


@pytest.fixture(params=[1, 1 << 30], ids=["one by one", "all at the end"])
def limit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(buffers, "WAITING", request.param)
    return request.param


@pytest.mark.parametrize(
    "more", [{}, {"optim.states": "bfloat16"}, {"optim.name": "sgd", "ema": 0.5}, {"optim.name": "muon"}]
)
def test_a_run_ends_with_the_same_weights(make_config, limit: int, more: dict[str, Any]) -> None:
    """Weights, moments and average of six steps are those of updates after the pass, bit for bit."""
    after = make_config(run_name="after", **{"optim.clip_norm": None}, **more)
    inside = make_config(run_name="inside", **INSIDE, **more)
    train(after)
    train(inside)
    (one, lines), (other, other_lines) = final_state(after), final_state(inside)
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
    for line, other_line in zip(lines, other_lines, strict=True):
        assert line.get("grad_norm", 0.0) == pytest.approx(other_line.pop("grad_norm", 0.0), rel=1e-5)
        assert line == line | other_line  # all else is equal; the norm is summed in another order


def test_a_loss_that_is_not_finite_changes_nothing(make_config) -> None:
    """Such a step is skipped as a whole, before the backward pass."""
    config = make_config(run_name="bad", steps=3, **INSIDE)
    good = make_objective(config.objective)
    seen: list[dict[str, torch.Tensor]] = []

    def objective(model: nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        seen.append({name: value.clone() for name, value in model.state_dict().items()})
        loss, numbers = good(model, batch)
        return (loss * float("nan") if len(seen) == 2 else loss), numbers

    train(config, objective=objective)
    assert all(torch.equal(seen[1][name], seen[2][name]) for name in seen[1])
    assert not all(torch.equal(seen[0][name], seen[1][name]) for name in seen[0])


@pytest.mark.parametrize("changes", [{"optim.clip_norm": 1.0}, {"accumulate": 2}])
def test_what_needs_the_whole_gradient_is_refused(make_config, changes: dict[str, Any]) -> None:
    config: TrainConfig = make_config(**{**INSIDE, **changes})
    with pytest.raises(ValueError, match=r"set optim\.clip_norm to None and accumulate to 1"):
        config.check()
