"""AdamW with moments in bfloat16, against torch's in float32."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from softmoe.accelerate import optimizer as adamw
from softmoe.accelerate.optimizer import CompactAdamW, round_at_random
from softmoe.train.config import OptimSection
from softmoe.train.optim import make_optimizer

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


def parameters(seed: int, *shapes: tuple[int, ...]) -> list[nn.Parameter]:
    torch.manual_seed(seed)
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


@given(seed=st.integers(0, 2**31), high=st.sampled_from([1e-30, 1e-8, 1.0, 1e20]))
def test_random_rounding_is_to_a_neighbor_and_right_in_the_mean(seed: int, high: float) -> None:
    """Values become one of the two bfloat16 numbers around them; those that bfloat16 has stay."""
    torch.manual_seed(seed)
    values = torch.rand(64) * high
    below = (values.view(torch.int32) & -(1 << 16)).view(torch.float32)
    above = (below.view(torch.int32) + (1 << 16)).view(torch.float32)
    rounded = values.clone()
    round_at_random(rounded, torch.randint(0, 1 << 16, (64,), dtype=torch.int32))
    assert ((rounded == below) | (rounded == above)).all()
    assert torch.equal(rounded.bfloat16().float(), rounded)
    again = rounded.clone()
    round_at_random(again, torch.full((64,), (1 << 16) - 1, dtype=torch.int32))
    assert torch.equal(again, rounded)


def test_the_mean_of_rounded_values_is_the_value() -> None:
    value = torch.full((1 << 16,), 1.0023)
    round_at_random(value, torch.arange(1 << 16, dtype=torch.int32))
    assert value.double().mean().item() == pytest.approx(1.0023, rel=1e-6)


needs_compiler = pytest.mark.skipif(not adamw.KERNEL.available, reason=f"not compiled: {adamw.KERNEL.why_not()}")


def test_the_first_step_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """From zero moments the update in pieces has nothing rounded in it: equal bits, whatever the pieces."""
    monkeypatch.setattr(adamw, "PIECE", 7)
    ours, theirs = parameters(0, (3, 5), (4,), ()), parameters(0, (3, 5), (4,), ())
    for one, other in zip(ours, theirs, strict=True):
        one.grad = other.grad = torch.randn(one.shape)
    CompactAdamW(ours, **SETTINGS).step()
    torch.optim.AdamW(theirs, **SETTINGS, fused=True).step()
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("together", [7, adamw.GPU_PIECE])
def test_many_together_as_one_by_one(monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    """What a GPU does, on a CPU: weights, first moments and counts of the first step are those of pieces, the second
    moments are the numbers of bfloat16 beside theirs; and where the flag says skip nothing changes at all."""
    monkeypatch.setattr(adamw, "GPU_PIECE", together)
    ours, theirs = parameters(0, (3, 5), (4,), ()), parameters(0, (3, 5), (4,), ())
    for one, other in zip(ours, theirs, strict=True):
        one.grad = other.grad = torch.randn(one.shape)
    optimizer, plain = CompactAdamW(ours, **SETTINGS), CompactAdamW(theirs, **SETTINGS)
    plain.step()
    group = optimizer.param_groups[0]

    def update(skip: float) -> None:
        rows = [optimizer._rows(p, p.grad) for p in ours if p.grad is not None]
        with torch.no_grad():
            adamw.update_together(rows, group, torch.tensor(skip))

    update(0.0)
    for one, other in zip(ours, theirs, strict=True):
        mine, reference = optimizer.state[one], plain.state[other]
        assert torch.equal(one, other)
        assert all(torch.equal(mine[name], reference[name]) for name in ("step", "exp_avg"))
        torch.testing.assert_close(mine["exp_avg_sq"].float(), reference["exp_avg_sq"].float(), rtol=2**-7, atol=0.0)
    before = [[p.detach().clone(), *(v.clone() for v in optimizer.state[p].values())] for p in ours]
    update(1.0)
    after = [[p.detach(), *optimizer.state[p].values()] for p in ours]
    assert all(torch.equal(a, b) for x, y in zip(before, after, strict=True) for a, b in zip(x, y, strict=True))


@needs_compiler
@pytest.mark.parametrize("piece", [7, 1 << 15, adamw.PIECE])
def test_one_pass_is_as_in_pieces(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """From the same state, twenty times: the same weights to rounding, and the same moments but for a few that lay at
    a limit and went to the neighbor. Gradients of very different sizes, rows longer than a thread's share."""
    monkeypatch.setattr(adamw, "PIECE", piece)
    ours, theirs = (parameters(0, (3, 5), (), (8, 9, 700)) for _ in range(2))
    compact, plain = CompactAdamW(ours, **SETTINGS), CompactAdamW(theirs, **SETTINGS)
    adamw.switch_on(nn.Identity(), compact)
    for step in range(20):
        torch.manual_seed(step)
        for one, other in zip(ours, theirs, strict=True):
            one.grad = other.grad = torch.randn(one.shape) * 10 ** torch.empty(one.shape).uniform_(-6, 2)
        compact.step()
        plain.step()
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
            one.data.copy_(other.data)
            for name in ("exp_avg", "exp_avg_sq"):
                moment, right = compact.state[one][name], plain.state[other][name]
                limit = 2**-7 * right.float().abs() + 1e-6 * torch.as_tensor(one.grad).abs()
                assert ((moment.float() - right.float()).abs() <= limit).all(), name
                assert (moment != right).float().mean() < 1e-3, name
                moment.copy_(right)


def test_many_steps_stay_near_torchs() -> None:
    """After 200 steps of changing gradients the weights are within 2 % of the way of those of float32 moments."""
    (one,), (other,) = parameters(0, (300,)), parameters(0, (300,))
    start = one.detach().clone()
    ours, theirs = CompactAdamW([one], **SETTINGS), torch.optim.AdamW([other], **SETTINGS, fused=True)
    torch.manual_seed(1)
    for step in range(200):
        one.grad = other.grad = (torch.randn(300) + 0.5) * 0.99**step
        ours.step()
        theirs.step()
    assert (one - other).norm() < 0.02 * (other - start).norm()


def test_the_second_moment_forgets() -> None:
    """With beta2 = 0.999 and gradients that vanish it falls as it should: to 1/e in 1,000 steps, within 5 %."""
    (weight,) = parameters(0, (2000,))
    optimizer = CompactAdamW([weight], lr=0.0, betas=(0.9, 0.999))
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    begun = optimizer.state[weight]["exp_avg_sq"].float().mean()
    weight.grad = torch.zeros_like(weight)
    for _ in range(1000):
        optimizer.step()
    assert (optimizer.state[weight]["exp_avg_sq"].float().mean() / begun).item() == pytest.approx(0.3677, rel=0.05)


def test_it_learns_as_well() -> None:
    """A small regression ends at about the loss that float32 moments reach, and the states take half the bytes."""

    def loss_after(states: str) -> tuple[float, int]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
        x = torch.randn(256, 8)
        y = x.prod(1, keepdim=True).tanh() + x[:, :1]
        optimizer = make_optimizer(model, OptimSection(states=states))  # pyright: ignore[reportArgumentType]
        for group in optimizer.param_groups:
            group["lr"] = 1e-2
        for _ in range(300):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
        moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        return loss.item(), sum(moment.nbytes for moment in moments)

    (full, bytes_full), (compact, bytes_compact) = loss_after("float32"), loss_after("bfloat16")
    assert compact == pytest.approx(full, rel=0.1)
    assert bytes_compact * 2 == bytes_full
