import json
import math
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from train.same_run import assert_same_run, final_state

from softmoe.budget.memory import activation_memory
from softmoe.data import Batch, Loader
from softmoe.models import ViTConfig
from softmoe.storage.checkpoint import read_checkpoint
from softmoe.train import Diverged, TrainConfig, loop, train
from softmoe.train.distributed import Team
from softmoe.train.folder import RunFolder
from softmoe.train.log import read_metrics
from softmoe.train.objectives import make_objective
from softmoe.train.run import Run, build
from softmoe.train.step import forward_backward, train_step


def built(config: TrainConfig) -> Run:
    return build(config, RunFolder.of(config))


@pytest.mark.parametrize("router", ["soft", "tokens_choice", "dense"])
def test_accumulation_equals_the_large_batch(make_config, router: str):
    """In float64, the loss and every gradient of four parts equal those of the whole batch."""
    torch.set_default_dtype(torch.float64)
    gradients, losses = [], []
    for parts in (1, 4):
        run = built(make_config(accumulate=parts, **{"model.router": router, "model.noise_std": 0.0}))
        batch = next(run.data.loader.batches(0))
        batch = replace(batch, images=batch.images.double())
        with torch.no_grad():
            run.model.head.weight.normal_()  # a zero head passes no gradient on
        loss, auxiliary, _ = forward_backward(run, batch)
        losses.append((loss.item(), auxiliary.item()))
        gradients.append({name: p.grad for name, p in run.model.named_parameters()})
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert (losses[0][1] > 0) == (router == "tokens_choice")
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-9, atol=1e-13, msg=name)


def test_the_average_is_the_plain_recursion(make_config):
    """e = d e + (1 - d) w after each step, starting from the first weights."""
    run = built(make_config(ema=0.75))
    assert run.average is not None
    expected = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    batches = run.data.loader.batches(0)
    for _ in range(3):
        train_step(run, next(batches))
        for name, p in run.model.named_parameters():
            expected[name] = 0.75 * expected[name] + 0.25 * p.detach()
    for name, p in run.average.model.named_parameters():
        torch.testing.assert_close(p, expected[name], msg=name)


def test_blocks_computed_twice_change_no_bit(make_config, capsys):
    """A run whose activations must keep to a limit computes a block twice, says which, and goes on from a checkpoint
    without a limit; it ends with the bits of a run that never had one."""
    plain, limited = make_config(run_name="plain"), make_config(run_name="limited", **{"log.quiet": False})
    train(plain)
    shape = built(plain).model.config
    assert isinstance(shape, ViTConfig)
    limited = replace(limited, steps=4, activation_gb=0.9e-9 * activation_memory(shape, 4, 4))
    run = built(limited)
    assert len(run.model.encoder.recomputed) == 1
    train(limited)
    assert "GB, 1 of 2 blocks are computed twice: " in capsys.readouterr().err
    train(replace(limited, steps=6, activation_gb=None))
    found, right = final_state(limited)[0], final_state(plain)[0]
    assert all(torch.equal(found[name], value) for name, value in right.items())


def poisoned(config: TrainConfig, bad: range, *, gradient_only: bool = False):
    """An objective that gives no finite loss (or gradient) at these calls."""
    real, calls = make_objective(config.objective), [0]

    def objective(model: nn.Module, batch: Any):
        loss, numbers = real(model, batch)
        calls[0] += 1
        if calls[0] - 1 not in bad:
            return loss, numbers
        if not gradient_only:
            return loss * math.nan, numbers
        head = next(p for name, p in model.named_parameters() if name == "head.bias")
        return loss + (head - head.detach()).abs().pow(0.5).sum(), numbers  # 0, with an infinite slope

    return objective


@pytest.mark.parametrize("gradient_only", [False, True])
def test_a_step_that_is_not_finite_is_skipped(make_config, gradient_only: bool, capfd: pytest.CaptureFixture):
    """No update is made, it is counted and told, and training goes on."""
    config = make_config(steps=3, **{"log.every": 1})
    result = train(config, objective=poisoned(config, range(1, 2), gradient_only=gradient_only))
    assert result.step == 3
    lines = [r for r in read_metrics(RunFolder.of(config).metrics) if "loss" in r]
    assert [r["skipped_steps"] for r in lines] == [0, 1, 1]
    assert lines[1]["loss"] is None
    assert lines[2]["loss"] is not None
    assert "step 2: loss" in capfd.readouterr().err
    tensors = read_checkpoint(RunFolder.of(config).checkpoints / "last").tensors
    assert all(t.isfinite().all() for named in tensors.values() for t in named.values())
    assert tensors["optimizer"]["head.bias/step"] == 2


def test_a_diverged_run_stops_with_advice(make_config):
    """After max_bad_steps in a row the error names the last good checkpoint, and the weights there are finite."""
    config = make_config(max_bad_steps=2)
    with pytest.raises(
        Diverged, match=r"2 steps in a row .* last good checkpoint is .*step_00000002.*Lower schedule.peak"
    ):
        train(config, objective=poisoned(config, range(2, 99)))
    tensors = read_checkpoint(RunFolder.of(config).checkpoints / "last").tensors
    assert all(t.isfinite().all() for t in tensors["model"].values())


def test_evaluators_are_handed_in(make_config):
    """Their numbers are in the metrics, the best step is kept and linked, and eval.json has the last and the best."""
    values = iter([0.1, 0.9, 0.3])
    seen: list[bool] = []

    def score(model: nn.Module, batches: Any) -> dict[str, float]:
        seen.append(model.training)
        assert sum(len(batch) for batch in batches) == 8
        return {"value": next(values)}

    config = make_config(**{"evaluation.every": 2, "evaluation.best": "mine/value", "checkpoint.every": 100})
    result = train(config, evaluators={"mine": score})
    assert result.numbers == {"mine/value": 0.3}
    assert seen == [False] * 3
    folder = RunFolder.of(config)
    assert [r["mine/value"] for r in read_metrics(folder.metrics) if "mine/value" in r] == [0.1, 0.9, 0.3]
    assert read_checkpoint(folder.checkpoints / "best").step == 4
    best = {"step": 4, "name": "mine/value", "value": 0.9}
    assert json.loads(folder.evaluation.read_text()) == {"step": 6, "numbers": {"mine/value": 0.3}, "best": best}


def test_a_signal_after_the_question_stops_a_step_later(make_config, monkeypatch: pytest.MonkeyPatch):
    """Several processes agree to stop while a step is computed. A signal that comes during the evaluation after it is
    not lost: they agree on it in the next step, and the run is saved."""

    def ask(team: Team, received: Callable[[], Any], failure: Exception | None = None) -> Callable[[], Any]:
        answer = received(), failure  # what is known when the question is asked
        return lambda: answer

    def evaluate(model: nn.Module, batches: Any) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGTERM)
        return {"top1": 0.5}

    monkeypatch.setattr(Team, "ask", ask)
    config = make_config(steps=6, **{"evaluation.every": 2, "checkpoint.every": 100})
    result = train(config, evaluators={"val": evaluate})
    assert (result.step, result.signal) == (3, signal.SIGTERM)
    assert read_checkpoint(RunFolder.of(config).checkpoints / "last").step == 3


def test_a_quiet_run_says_nothing(make_config, capsys):
    """Neither progress nor what makes it faster; warnings still come."""
    train(make_config(steps=2, run_name="quiet"))
    assert capsys.readouterr() == ("", "")
    train(make_config(steps=2, run_name="loud", **{"log.quiet": False}))
    assert "step 2: val/top1" in "".join(capsys.readouterr())


def test_of_equal_accuracies_the_lower_loss_is_best(make_config):
    """With few validation images accuracies are often the same: an early step does not stay the best for that."""
    found = iter([(0.5, 2.0), (0.5, 1.0), (0.5, 1.5)])

    def score(model: nn.Module, batches: Any) -> dict[str, float]:
        list(batches)
        return dict(zip(("value", "loss"), next(found), strict=True))

    config = make_config(**{"evaluation.every": 2, "evaluation.best": "mine/value", "checkpoint.every": 100})
    train(config, evaluators={"mine": score})
    folder = RunFolder.of(config)
    assert read_checkpoint(folder.checkpoints / "best").step == 4
    best = {"step": 4, "name": "mine/value", "value": 0.5, "loss": 1.0}
    assert json.loads(folder.evaluation.read_text())["best"] == best


def test_a_missing_best_number_is_named(make_config):
    """A typo in evaluation.best lists what there is."""
    with pytest.raises(ValueError, match=r"evaluation.best is 'val/top7', but .* val/top1, val/top5, val/loss"):
        train(make_config(steps=1, **{"evaluation.best": "val/top7"}))


def test_metrics_have_the_axes_of_the_paper(make_config):
    """Cumulative images, FLOPs and device seconds, and the health of every router."""
    config = make_config()
    train(config)
    lines = [r for r in read_metrics(RunFolder.of(config).metrics) if "loss" in r]
    assert [r["step"] for r in lines] == [2, 4, 6]
    assert [r["images"] for r in lines] == [8, 16, 24]
    assert lines[2]["flops"] == 3 * lines[0]["flops"] > 0
    assert 0 < lines[0]["device_seconds"] < lines[2]["device_seconds"]
    assert set(lines[0]["routers"]) == {"encoder.blocks.1.mlp"}
    assert {"scale", "max_dispatch", "max_combine", "slot_similarity"} == set(
        lines[0]["routers"]["encoder.blocks.1.mlp"]
    )


def test_the_start_of_data_workers_is_no_training_time(make_config, monkeypatch: pytest.MonkeyPatch):
    """The seconds of a run are those of its steps; what it takes until the first batch is there is not in them."""
    now, batches = [0.0], Loader.batches

    def late(self: Loader, start_step: int = 0) -> Iterator[Batch]:
        now[0] += 100.0
        for batch in batches(self, start_step):
            yield batch
            now[0] += 1.0

    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(Loader, "batches", late)
    rows = read_metrics(train(make_config(steps=6)).folder.metrics)
    assert rows[-1]["device_seconds"] == 5.0


def test_the_loss_falls(make_config):
    """Thirty steps on one batch-sized data set are enough to learn it."""
    config = make_config(
        steps=40, **{"data.train": "shapes?size=16&length=4", "checkpoint.every": 100, "log.every": 10}
    )
    train(config)
    losses = [r["loss"] for r in read_metrics(RunFolder.of(config).metrics) if "loss" in r]
    assert losses[-1] < 0.3 * losses[0]


def test_bfloat16_falls_back_with_a_line(make_config, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture):
    """Where bfloat16 does not work the run says so and computes in float32, the same bits as asked for directly."""
    monkeypatch.setattr("softmoe.machine.bfloat16_works", lambda: False)
    low, full = make_config(run_name="low", steps=2, precision="bfloat16"), make_config(run_name="full", steps=2)
    train(low)
    assert "no working bfloat16, going on in float32" in capfd.readouterr().err
    train(full)
    assert_same_run(low, full)


def test_gradient_checkpointing_changes_nothing(make_config):
    """Same losses and weights, with dropout and a sparse router, whose random numbers must be drawn again alike."""
    changes = {"model.router": "tokens_choice", "model.dropout": 0.1}
    plain = make_config(run_name="plain", **changes)
    again = make_config(run_name="again", gradient_checkpointing=True, **changes)
    train(plain)
    train(again)
    (tensors, lines), (others, other_lines) = final_state(plain), final_state(again)
    for name, tensor in tensors.items():
        torch.testing.assert_close(others[name], tensor, rtol=1e-4, atol=1e-6, msg=name)
    assert [r["loss"] for r in other_lines if "loss" in r] == pytest.approx([r["loss"] for r in lines if "loss" in r])


@pytest.mark.parametrize(
    ("device", "why"),
    [("cuda:99", ""), ("nonsense", "it is none of auto, cpu, cuda, cuda:1 and mps"), ("mps", "no Apple GPU")],
)
def test_a_missing_device_is_one_sentence(make_config, device: str, why: str):
    """Not a traceback from torch, nor its list of all devices that there are in the world."""
    if device == "mps" and torch.backends.mps.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match=f"device '{device}' cannot be used here: .*{why}") as found:
        train(make_config(device=device))
    assert len(str(found.value)) < 200


def test_captions_reach_an_objective_of_the_users(make_config) -> None:
    """Our own objective for classes does not read them, so they are not made for it."""
    config = make_config(run_name="captions", steps=1)
    good, seen = make_objective(config.objective), []

    def objective(model, batch):
        seen.append(batch.captions)
        return good(model, batch)

    train(config, objective=objective)
    assert seen
    assert all(captions and all(captions) for captions in seen)
    run = built(replace(config, run_name="without"))
    assert next(run.data.loader.batches(0)).captions == next(run.data.validation()).captions == ()
    run.close()
