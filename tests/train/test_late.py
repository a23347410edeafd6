"""What a GPU's steps do, done on a CPU: numbers are read a step late, and the update itself decides on skipping."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from train.same_run import assert_same_run

from softmoe.accelerate import guards
from softmoe.train import Diverged, loop, train
from softmoe.train.folder import RunFolder
from softmoe.train.log import read_metrics
from softmoe.train.objectives import make_objective
from softmoe.train.run import Pending

INSIDE = {"optim.in_backward": True, "optim.clip_norm": None}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "average": {"ema": 0.5, "optim.clip_norm": None},
    "in the backward pass": INSIDE,
    "average in the backward pass": {"ema": 0.5, **INSIDE},
    "accumulated": {"accumulate": 2, "model.router": "tokens_choice"},
}


@pytest.fixture
def reads_late(monkeypatch: pytest.MonkeyPatch):
    """Call it to make this CPU one that is not waited for."""

    def switch() -> None:
        monkeypatch.setattr(guards, "ASYNC_DEVICES", ("cpu",))

    return switch


def spoiled_at(config: Any, calls: set[int]):
    """An objective whose loss is not finite at these calls."""
    real, count = make_objective(config.objective), [0]

    def objective(model: nn.Module, batch: Any):
        count[0] += 1
        loss, numbers = real(model, batch)
        return (loss * float("nan") if count[0] in calls else loss), numbers

    return objective


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("bad", [(), (1, 4)], ids=["good", "some bad"])
def test_the_same_run(make_config, reads_late, case: str, bad: tuple[int, ...]) -> None:
    """Weights, moments, averages and metrics of steps read late are those of steps read at once, bit for bit, also
    where some have no finite loss: at the first, and at one that would be saved."""
    changes = {"max_bad_steps": 9, **CASES[case]}
    at_once, behind = make_config(run_name="at_once", **changes), make_config(run_name="behind", **changes)
    train(at_once, objective=spoiled_at(at_once, set(bad)))
    reads_late()
    train(behind, objective=spoiled_at(behind, set(bad)))
    assert_same_run(at_once, behind)


def test_the_seconds_of_every_step_count(make_config, reads_late, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time for which the host waits for a step is the run's, in whichever step or line of metrics it waits."""
    now, read = [0.0], Pending.read

    def waiting(self: Pending) -> list[float]:
        now[0] += 1.0
        return read(self)

    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(Pending, "read", waiting)
    reads_late()
    rows = read_metrics(train(make_config(steps=6, **{"log.every": 2})).folder.metrics)
    assert rows[-1]["device_seconds"] == 6.0


def test_a_diverged_run_stops(make_config, reads_late, capfd: pytest.CaptureFixture) -> None:
    """Bad steps are reported by their own numbers, and too many in a row end the run, at most a step later."""
    reads_late()
    config = make_config(steps=40, max_bad_steps=3, **{"checkpoint.every": 4, "log.every": 40})
    with pytest.raises(Diverged, match="3 steps in a row gave no finite loss"):
        train(config, objective=spoiled_at(config, set(range(6, 40))))
    said = capfd.readouterr().err
    assert [f"step {number}: loss nan" in said for number in (5, 6, 7, 8)] == [False, True, True, True]


def test_weights_that_are_not_finite_are_not_saved(make_config, reads_late, capfd: pytest.CaptureFixture) -> None:
    """The writer looks at the copies before it writes: a spoiled one is left out, and the run says so."""
    reads_late()
    config = make_config(steps=5, **{"evaluation.every": None})
    real, calls = make_objective(config.objective), [0]

    def objective(model: Any, batch: Any):
        calls[0] += 1
        loss, numbers = real(model, batch)
        if calls[0] == 4:
            model.head.bias.detach().fill_(float("inf"))
        return loss, numbers

    with pytest.raises(ValueError, match="not finite"):  # the evaluation at the end
        train(config, objective=objective)
    assert "step 4 is not saved: its weights are not finite numbers" in capfd.readouterr().err
    assert [path.name for path in RunFolder.of(config).checkpoints.glob("step_*")] == ["step_00000002"]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_skipped_update_changes_nothing(name: str) -> None:
    """torch's fused updates leave weights and state as they are where the flag is set, and else step as ever."""
    weight = nn.Parameter(torch.randn(5))
    make = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name]
    optimizer = make([weight], lr=0.1, fused=True, **({"momentum": 0.9} if name == "sgd" else {}))
    weight.grad = torch.randn(5)
    optimizer.step()
    before = [weight.clone(), *(value.clone() for value in optimizer.state[weight].values())]
    with guards.skipped_where(optimizer, torch.tensor(True)):
        optimizer.step()
    after = [weight, *optimizer.state[weight].values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    with guards.skipped_where(optimizer, torch.tensor(False)):
        optimizer.step()
    assert not torch.equal(weight, before[0])
