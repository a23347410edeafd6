"""The compiled products for few rows, against plain float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from softmoe.moe import Experts, rows
from softmoe.moe.product import GradientPool, batched_linear
from softmoe.train.in_backward import Released

needs_compiler = pytest.mark.skipif(isinstance(rows._library(), str), reason=f"not compiled: {rows._library()}")


def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The compiled products that are called from now on."""
    calls: list[str] = []
    for name in ("across", "along", "outer"):
        function = getattr(rows, name)
        monkeypatch.setattr(rows, name, lambda *args, f=function, n=name: (calls.append(n), f(*args))[1])
    return calls


def output_and_gradients(
    x: Tensor, w: Tensor, b: Tensor, upstream: Tensor, transposed: bool, pool: GradientPool | None
) -> list[Tensor]:
    inputs = [tensor.clone().requires_grad_() for tensor in (x, w, b)]
    y = batched_linear(*inputs, transposed=transposed, pool=pool)
    return [y.detach(), *torch.autograd.grad(y, inputs, upstream)]


@needs_compiler
@given(
    N=st.integers(1, 3),
    S=st.integers(1, 32),
    P=st.integers(1, 70),
    vectors=st.integers(1, 35),
    transposed=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_output_and_gradients(N: int, S: int, P: int, vectors: int, transposed: bool, seed: int) -> None:
    """Every number of rows, lines and vectors, so every tile and every rest of one; all three products are taken."""
    torch.manual_seed(seed)
    Q = 16 * vectors
    x = torch.randn(N, S, Q if transposed else P)
    w, b = torch.randn(N, P, Q), torch.randn(N, P if transposed else Q)
    upstream = torch.randn(N, S, P if transposed else Q)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "LARGE", 0)
        calls = used(patch)
        found = output_and_gradients(x, w, b, upstream, transposed, GradientPool())
    assert sorted(calls) == ["across", "along", "outer"]
    exact = output_and_gradients(*(t.double() for t in (x, w, b, upstream)), transposed, None)
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5 * max(P, Q, 16) ** 0.5)


@needs_compiler
def test_a_layer_trains_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of a training run: output and all gradients as by the usual products, from rows that lie apart."""
    torch.manual_seed(0)
    experts = Experts(24, 64, 6)
    x = torch.randn(8, 6, 24).transpose(0, 1)

    def gradients() -> list[Tensor]:
        experts.zero_grad()
        y = experts(x)
        y.square().sum().backward()
        return [y.detach(), *(torch.as_tensor(p.grad).clone() for p in experts.parameters())]

    plain = gradients()
    monkeypatch.setattr(rows, "LARGE", 0)
    calls = used(monkeypatch)
    assert [t.shape for t in gradients()] == [t.shape for t in plain]
    assert calls == []  # nobody trains it yet
    Released(torch.optim.SGD(experts.parameters()), experts)
    for one, other in zip(gradients(), plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)
    assert len(calls) == 5  # the rows themselves need no gradient


@needs_compiler
def test_what_they_do_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small weights, many rows, other types, lines of another length, tensors without numbers: the usual products."""
    w = torch.zeros(2, 3, 32)
    assert not rows.serve(torch.zeros(2, 4, 3), w)
    monkeypatch.setattr(rows, "LARGE", 0)
    assert rows.serve(torch.zeros(2, 4, 3), w)
    assert not rows.serve(torch.zeros(2, 33, 3), w)
    assert not rows.serve(torch.zeros(2, 4, 3).double(), w.double())
    assert not rows.serve(torch.zeros(2, 4, 3), torch.zeros(2, 3, 33))
    assert not rows.serve(torch.zeros(2, 4, 3), torch.zeros(2, 32, 3).transpose(1, 2))
    assert not rows.serve(torch.zeros(2, 4, 3, device="meta"), w.to("meta"))


@needs_compiler
@pytest.mark.parametrize("case", ["one pass", "two passes", "changed", "used twice", "done with"])
def test_norm_of_gradients(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm is that of the gradients as they are; only what was left alone since it was written is not read."""
    torch.manual_seed(0)
    monkeypatch.setattr(rows, "LARGE", 0)
    experts = Experts(24, 64, 6)
    release = Released(torch.optim.SGD(experts.parameters()), experts)
    for _ in range(2 if case == "two passes" else 1):
        y = experts(torch.randn(6, 20, 24))
        y = experts(y) if case == "used twice" else y
        y.square().sum().backward()
    gradients = [torch.as_tensor(p.grad) for p in experts.parameters()]
    if case == "changed":
        gradients[0].mul_(3)
        experts.w2.grad = torch.ones_like(experts.w2)
        gradients = [torch.as_tensor(p.grad) for p in experts.parameters()]
    if case == "done with":
        release()
        gradients = [torch.ones_like(g) for g in gradients]
    expected = torch.stack([g.double().norm() for g in gradients]).norm()
    read: list[Tensor] = []
    total = torch.nn.utils.get_total_norm
    monkeypatch.setattr(torch.nn.utils, "get_total_norm", lambda tensors: (read.extend(tensors), total(tensors))[1])
    torch.testing.assert_close(release.norm(gradients).double(), expected, rtol=1e-6, atol=0)
    assert len(read) == (2 if case == "one pass" else 4)
