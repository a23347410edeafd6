"""Updates during the backward pass, against updates after it."""

from concurrent.futures import Future
from importlib import import_module
from threading import Event, Timer
from typing import Any

import pytest
import torch
from torch import nn

from softmoe.accelerate import apply, buffers, build
from softmoe.accelerate.buffers import GradientBuffers, InBackward
from softmoe.accelerate.optimizer import KERNEL, CompactAdamW
from softmoe.models import MoEConfig, VisionTransformer, ViTConfig
from softmoe.moe import Experts
from softmoe.train.config import OptimSection
from softmoe.train.optim import gradients, make_optimizer, set_learning_rate

INSIDE = {"optim.in_backward": True, "optim.clip_norm": None}


needs_accelerations = pytest.mark.skipif(build.turned_off(), reason="turned off by SOFTMOE_ACCELERATE")


@pytest.fixture(params=[1, 1 << 30], ids=["one by one", "all at the end"])
def limit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(buffers, "WAITING", request.param)
    return request.param


def small() -> VisionTransformer:
    torch.manual_seed(0)
    moe = MoEConfig.of(num_experts=2)
    return VisionTransformer(
        ViTConfig(image_size=8, patch_size=4, width=8, depth=2, mlp_dim=8, heads=2, num_classes=3, moe=moe)
    )


def test_gradients_go_when_they_are_used(limit: int) -> None:
    """After the pass at most WAITING bytes are left, and `finish` returns the norm of all of them."""
    model, twin = small(), small()
    optimizer = make_optimizer(model, OptimSection())
    set_learning_rate(optimizer, 1e-3)
    apply(model, optimizer)
    inside = InBackward(optimizer)
    images = torch.randn(2, 3, 8, 8)
    model(images).square().sum().backward()
    twin(images).square().sum().backward()
    assert sum(g.nbytes for g in gradients(optimizer)) < limit
    expected = torch.nn.utils.get_total_norm([p.grad for p in twin.parameters() if p.grad is not None])
    torch.testing.assert_close(inside.finish(), expected)
    assert not gradients(optimizer)


@needs_accelerations
def test_experts_gradients_use_their_memory_again() -> None:
    """The second pass writes the experts' gradients where those of the first lay; values are those of a fresh model."""
    model, twin = small(), small()
    optimizer = make_optimizer(model, OptimSection())
    apply(model, optimizer)
    apply(twin)
    images = torch.randn(2, 3, 8, 8)
    twin(images).square().sum().backward()
    weights = [p for name, p in model.named_parameters() if name.endswith((".w1", ".w2"))]
    places = []
    for _ in range(2):
        optimizer.zero_grad()
        model(images).square().sum().backward()
        places.append({p.grad.data_ptr() for p in weights if p.grad is not None})
    assert places[0] == places[1]
    assert len(places[0]) == len(weights) == 2
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # pyright: ignore[reportArgumentType]


def compact(model: nn.Module) -> InBackward:
    optimizer = make_optimizer(model, OptimSection(states="bfloat16"))
    set_learning_rate(optimizer, 1e-3)
    apply(model, optimizer)
    return InBackward(optimizer)


@pytest.mark.skipif(not KERNEL.available, reason=f"not compiled: {KERNEL.why_not()}")
def test_compiled_updates_run_beside_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one waits for what happens after the pass; `finish` waits for all."""
    torch.set_num_threads(2)
    monkeypatch.setattr(buffers, "WAITING", 1)
    monkeypatch.setattr(buffers, "MAX_IN_FLIGHT", 1 << 30)  # or the pass would wait in its turn
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


@pytest.mark.skipif(not KERNEL.available, reason=f"not compiled: {KERNEL.why_not()}")
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


def pool_of(shape: tuple[int, ...], count: int = 4) -> tuple[list[nn.Parameter], GradientBuffers]:
    """Buffers for that many stacks of one shape."""
    stacks = [Experts(shape[1], shape[2], shape[0]) for _ in range(count // 2)]
    model = nn.ModuleList(stacks)
    optimizer = torch.optim.SGD(model.parameters())
    made = GradientBuffers(optimizer, model)
    OPTIMIZERS.append(optimizer)  # which the buffers live with
    return made.parameters, made


OPTIMIZERS: list[torch.optim.Optimizer] = []


def test_the_pool_hands_out_what_came_back() -> None:
    """The very memory of a gradient that was handed out and came back, for the same weights and type only."""
    (one, *_), pool = pool_of((2, 3, 5))
    one.grad = pool.acquire(one.detach())
    place = one.grad.data_ptr()
    pool.zero_grad()
    assert one.grad is None
    assert buffers.acquire(one.detach().double()).data_ptr() != place
    assert buffers.acquire(torch.empty(2, 3, 5)).data_ptr() != place
    again = buffers.acquire(one)
    assert again.data_ptr() == place
    assert buffers.acquire(one).data_ptr() != place


@pytest.mark.parametrize("how", ["itself", "view", "numpy"])
def test_memory_that_somebody_else_has_is_not_used_again(how: str) -> None:
    """A gradient that was kept keeps its numbers."""
    (one, *_), pool = pool_of((2, 3, 7))
    one.grad = pool.acquire(one.detach()).fill_(1.0)
    kept = {"itself": one.grad, "view": one.grad[0].detach(), "numpy": one.grad.numpy()}[how]
    pool.zero_grad()
    assert pool.bytes_held() == 0
    buffers.acquire(one).fill_(2.0)
    assert (kept == 1.0).all()


def test_memory_that_is_still_used_is_waited_for() -> None:
    """A second gradient is made beside the first; the third takes the place of the first when that is done."""
    (one, two, *_), pool = pool_of((2, 3, 11))
    done: list[Future[None]] = [Future(), Future()]
    places = []
    for parameter, update in zip((one, two), done, strict=True):
        parameter.grad = pool.acquire(one.detach())
        places.append(parameter.grad.data_ptr())
        pool.release(update)
    timer = Timer(0.2, lambda: done[0].set_result(None))
    timer.start()
    third = pool.acquire(one.detach())
    assert done[0].done(), "it did not wait"
    assert third.data_ptr() == places[0]
    fourth = pool.acquire(one.detach())
    assert fourth.data_ptr() != places[1]
    done[1].set_exception(MemoryError())  # whoever started it hears of it; the memory is free
    assert pool.acquire(one.detach()).data_ptr() == places[1]


@needs_accelerations
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("compiled", [False, True])
def test_held_memory_does_not_grow(accumulate: int, checkpointing: bool, precision: str, compiled: bool) -> None:
    """Twenty steps hold at most one buffer for each stack of weights, whoever makes the gradients."""
    model = small()
    model.set_grad_checkpointing(checkpointing)
    optimizer = make_optimizer(model, OptimSection())
    apply(model, optimizer)
    forward = torch.compile(model, backend="aot_eager") if compiled else model
    pool = GradientBuffers.of(optimizer)
    assert pool is not None
    images, held = torch.randn(2, 3, 8, 8), []
    for _ in range(20):
        optimizer.zero_grad()
        held.append(pool.bytes_held())
        for _ in range(accumulate):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
                loss = forward(images).square().sum()
            loss.backward()
        optimizer.step()
    assert held[2] == held[-1] <= sum(p.nbytes for p in pool.parameters)


def test_the_planner_counts_the_same_memory() -> None:
    """softmoe.budget does not import accelerations; its two figures are theirs."""
    memory = import_module("softmoe.budget.memory")
    assert (memory.MAX_IN_FLIGHT, memory.WAITING) == (buffers.MAX_IN_FLIGHT, buffers.WAITING)
