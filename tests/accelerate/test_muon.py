"""The compiled step of Muon against the plain one in float64."""

import copy

import pytest
import torch
from torch import nn

from softmoe.accelerate import muon as module
from softmoe.accelerate.guards import skipped_where
from softmoe.train.muon import Muon

needs_compiler = pytest.mark.skipif(not module.KERNEL.available, reason=f"not compiled: {module.KERNEL.why_not()}")
SHAPES = [(64, 16), (5, 37), (37, 5), (16, 16), (1, 9), (3, 24, 96), (4, 33, 17), (70, 150)]
QKV = (3 * 20, 20)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of matrices that are handed to the compiled step from now on."""
    calls: list[int] = []
    plain = module.launch
    monkeypatch.setattr(
        module, "launch", lambda lib, matrices, *args: (calls.append(len(matrices)), plain(lib, matrices, *args))
    )
    return calls


def optimizer(dtype: torch.dtype = torch.float32, *, gradients: float = 1.0) -> Muon:
    """Muon with the compiled step for matrices of all shapes, a query, key and value in one, and a bias by AdamW."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in (*SHAPES, QKV, (7,))]
    for weight in weights:
        weight.grad = (gradients * torch.randn(weight.shape)).to(dtype)
    names = [*(f"matrix{i}" for i in range(len(SHAPES))), "attention.qkv.weight"]
    groups = [
        {"params": weights[:-1], "names": names, "muon": True, "weight_decay": 0.1, "lr": 0.03},
        {"params": weights[-1:], "names": ["bias"], "weight_decay": 0.0, "lr": 0.03},
    ]
    made = Muon(groups, betas=(0.9, 0.99), eps=1e-8)
    module.switch_on(nn.ParameterList(weights), made)
    return made


def numbers(of: Muon) -> list[torch.Tensor]:
    """All weights and momenta."""
    weights = [p.detach() for group in of.param_groups for p in group["params"]]
    matrices = [p for group in of.param_groups if group["muon"] for p in group["params"]]
    return [*weights, *(of.state[p]["momentum_buffer"] for p in matrices)]


@needs_compiler
@pytest.mark.parametrize("gradients", [1.0, 1e-5, 1e5, 0.0])
def test_weights_and_momenta(compiled: list[int], gradients: float) -> None:
    """Three steps of wide, tall, square, stacked and joined matrices, so any rest of a vector and of a tile."""
    fast, exact = optimizer(gradients=gradients), optimizer(torch.float64, gradients=gradients)
    for _ in range(3):
        fast.step()
        exact.step()
    assert compiled == 3 * [6 + 3 + 4 + 3], "float64 is not for the compiled step"
    for one, other in zip(numbers(fast), numbers(exact), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5 * max(1.0, gradients))


@needs_compiler
def test_two_momenta_in_one_pass(compiled: list[int]) -> None:
    """Each matrix has the momentum of its group."""
    fast, exact = optimizer(), optimizer(torch.float64)
    for made in (fast, exact):
        group = made.param_groups[0]
        own = {key: group[key][4:] for key in ("params", "names")} | {"momentum": 0.6}
        made.param_groups.append(group | own)
        for key in ("params", "names"):
            group[key] = group[key][:4]
    for _ in range(3):
        fast.step()
        exact.step()
    assert compiled == 3 * [16]
    for one, other in zip(numbers(fast), numbers(exact), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


@needs_compiler
def test_the_number_of_threads_changes_no_bit(compiled: list[int]) -> None:
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        made = optimizer()
        made.step()
        results.append(numbers(made))
    torch.set_num_threads(1)
    assert compiled == 3 * [16]
    for others in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], others, strict=True))


@needs_compiler
def test_what_is_not_for_it_is_left_to_torch(compiled: list[int]) -> None:
    """Lines of a larger tensor, and a step that a flag may skip; a copy of the optimizer is a plain one."""
    made, exact = optimizer(), optimizer(torch.float64)
    wide = torch.zeros(64, 32)
    for one, like in ((made, wide), (exact, wide.double())):
        weight = one.param_groups[0]["params"][0]
        weight.data = like[:, ::2].copy_(weight.data)
    made.step()
    exact.step()
    assert compiled == [15]
    with skipped_where(made, torch.tensor(False)):
        made.step()
    exact.step()
    other = copy.deepcopy(made)
    for one, twin in zip(made.param_groups, other.param_groups, strict=True):
        for p, its in zip(one["params"], twin["params"], strict=True):
            its.grad = p.grad
    other.step()
    exact.step()
    assert compiled == [15]
    for one, expected in zip(numbers(other), numbers(exact), strict=True):
        torch.testing.assert_close(one.double(), expected, rtol=1e-5, atol=1e-5)


@needs_compiler
def test_few_matrices_and_many_threads_are_left_to_torch(compiled: list[int]) -> None:
    """A matrix is computed by one thread; with more threads than matrices torch shares its products among them."""
    torch.set_num_threads(17)
    optimizer().step()
    torch.set_num_threads(1)
    assert compiled == []


def test_other_optimizers_are_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(module.Off, match="not Muon"):
        module.switch_on(model, torch.optim.AdamW(model.parameters()))


@needs_compiler
def test_a_wrong_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-test sees a step that does nothing."""
    monkeypatch.setattr(module, "launch", lambda *_: None)
    assert not module.self_test(module.KERNEL.library)
