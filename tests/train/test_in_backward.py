"""Updates during the backward pass, against updates after it."""

from threading import Event
from typing import Any

import pytest
import torch
from torch import nn
from train.same_run import final_state

from softmoe.models import MoEConfig, VisionTransformer, ViTConfig
from softmoe.moe import product
from softmoe.train import in_backward, train
from softmoe.train.adamw import CompactAdamW, kernel
from softmoe.train.config import OptimSection, TrainConfig
from softmoe.train.in_backward import InBackward, Released
from softmoe.train.objectives import make_objective
from softmoe.train.optim import gradients, make_optimizer, set_learning_rate

INSIDE = {"optim.in_backward": True, "optim.clip_norm": None}


@pytest.fixture(params=[1, 1 << 30], ids=["one by one", "all at the end"])
def limit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(in_backward, "LIMIT", request.param)
    return request.param


@pytest.mark.parametrize("more", [{}, {"optim.states": "bfloat16"}, {"optim.name": "sgd", "ema": 0.5}])
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


def small() -> VisionTransformer:
    torch.manual_seed(0)
    moe = MoEConfig.of(num_experts=2)
    return VisionTransformer(
        ViTConfig(image_size=8, patch_size=4, width=8, depth=2, mlp_dim=8, heads=2, num_classes=3, moe=moe)
    )


def test_gradients_go_when_they_are_used(limit: int) -> None:
    """After the pass at most LIMIT bytes are left, and `finish` returns the norm of all of them."""
    model, twin = small(), small()
    optimizer = make_optimizer(model, OptimSection())
    set_learning_rate(optimizer, 1e-3)
    inside = InBackward(optimizer, Released(optimizer, model))
    images = torch.randn(2, 3, 8, 8)
    model(images).square().sum().backward()
    twin(images).square().sum().backward()
    assert sum(g.nbytes for g in gradients(optimizer)) < limit
    expected = torch.nn.utils.get_total_norm([p.grad for p in twin.parameters() if p.grad is not None])
    torch.testing.assert_close(inside.finish(), expected)
    assert not gradients(optimizer)


def test_experts_gradients_use_their_memory_again() -> None:
    """The second pass writes the experts' gradients where those of the first lay; values are those of a fresh model."""
    model, twin = small(), small()
    release = Released(make_optimizer(model, OptimSection()), model)
    images = torch.randn(2, 3, 8, 8)
    twin(images).square().sum().backward()
    weights = [p for name, p in model.named_parameters() if name.endswith((".w1", ".w2"))]
    places = []
    for _ in range(2):
        release()
        model(images).square().sum().backward()
        places.append({p.grad.data_ptr() for p in weights if p.grad is not None})
    assert places[0] == places[1]
    assert len(places[0]) == len(weights) == 2
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # pyright: ignore[reportArgumentType]


def compact(model: nn.Module) -> InBackward:
    optimizer = make_optimizer(model, OptimSection(states="bfloat16"))
    set_learning_rate(optimizer, 1e-3)
    return InBackward(optimizer, Released(optimizer, model))


@pytest.mark.skipif(isinstance(kernel(), str), reason=f"not compiled: {kernel()}")
def test_compiled_updates_run_beside_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one waits for what happens after the pass; `finish` waits for all."""
    torch.set_num_threads(2)
    monkeypatch.setattr(in_backward, "LIMIT", 1)
    monkeypatch.setattr(product, "OUT", 1 << 30)  # or the pass would wait in its turn
    passed, update, calls = Event(), CompactAdamW.update, []

    def slow(self: CompactAdamW, gradients: dict[torch.Tensor, torch.Tensor], threads: int) -> None:
        assert passed.wait(60)
        calls.append(threads)
        update(self, gradients, threads)

    monkeypatch.setattr(CompactAdamW, "update", slow)
    model = small()
    before = [p.detach().clone() for p in model.parameters()]
    inside = compact(model)
    model(torch.randn(2, 3, 8, 8)).square().sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    passed.set()
    inside.finish()
    assert calls == [1] * len(before)
    assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.skipif(isinstance(kernel(), str), reason=f"not compiled: {kernel()}")
def test_an_update_that_fails_beside_the_pass_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(2)

    def fail(*_: Any) -> None:
        raise MemoryError("no room for the moments")

    monkeypatch.setattr(CompactAdamW, "update", fail)
    model = small()
    inside = compact(model)
    model(torch.randn(2, 3, 8, 8)).square().sum().backward()
    with pytest.raises(MemoryError, match="no room"):
        inside.finish()


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
