"""The compiled products, against plain float64."""

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transforms import TRANSFORMS

from softmoe.accelerate import apply, buffers, guards
from softmoe.accelerate import experts as module
from softmoe.accelerate.experts import KERNEL, batched_linear
from softmoe.moe import Experts, SoftMoE

needs_compiler = pytest.mark.skipif(not KERNEL.available, reason=f"not compiled: {KERNEL.why_not()}")


def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The compiled products that are called from now on."""
    calls: list[str] = []
    for name in ("matmul", "matmul_t", "outer"):
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, f=function, n=name: (calls.append(n), f(*args))[1])
    return calls


def output_and_gradients(x: Tensor, w: Tensor, b: Tensor, upstream: Tensor, transposed: bool) -> list[Tensor]:
    inputs = [tensor.clone().requires_grad_() for tensor in (x, w, b)]
    y = batched_linear(*inputs, transposed)
    return [y.detach(), *torch.autograd.grad(y, inputs, upstream)]


@needs_compiler
@given(
    N=st.integers(1, 3),
    S=st.integers(1, 24),
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
        patch.setattr(module, "LARGE", 0)
        calls = used(patch)
        found = output_and_gradients(x, w, b, upstream, transposed)
    assert sorted(calls) == ["matmul", "matmul_t", "outer"]
    exact = output_and_gradients(*(t.double() for t in (x, w, b, upstream)), transposed)
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5 * max(P, Q, 16) ** 0.5)


@needs_compiler
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("N", "S", "P", "Q"),
    [(1, 33, 1, 16), (2, 64, 385, 32), (3, 65, 70, 272), (1, 127, 13, 528), (2, 257, 193, 48), (1, 512, 37, 1552)],
)
def test_more_rows(N: int, S: int, P: int, Q: int, transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows: tiles of every height, weights and rows of several blocks and rests of them."""
    torch.manual_seed(S)
    x = torch.randn(N, S, Q if transposed else P)
    w, b = torch.randn(N, P, Q), torch.randn(N, P if transposed else Q)
    upstream = torch.randn(N, S, P if transposed else Q)
    monkeypatch.setattr(module, "LARGE", 0)
    calls = used(monkeypatch)
    found = output_and_gradients(x, w, b, upstream, transposed)
    assert sorted(calls) == ["matmul", "matmul_t", "outer"]
    exact = output_and_gradients(*(t.double() for t in (x, w, b, upstream)), transposed)
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5 * max(P, Q, S) ** 0.5)


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
    monkeypatch.setattr(module, "LARGE", 0)
    calls = used(monkeypatch)
    assert [t.shape for t in gradients()] == [t.shape for t in plain]
    assert calls == []  # nothing was applied yet
    apply(experts)
    for one, other in zip(gradients(), plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)
    assert len(calls) == 5  # the rows themselves need no gradient


@needs_compiler
def test_an_empty_batch_is_the_plain_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer without images gives no tokens and gradients of zero, with and without gradients in the forward."""
    monkeypatch.setattr(module, "LARGE", 0)
    layer = SoftMoE(24, 6, hidden_dim=64)
    apply(layer)
    calls = used(monkeypatch)
    with torch.no_grad():
        assert layer(torch.zeros(0, 4, 24)).shape == (0, 4, 24)
    x = torch.zeros(0, 4, 24, requires_grad=True)
    layer(x).sum().backward()
    assert torch.as_tensor(x.grad).shape == x.shape
    for parameter in layer.experts.parameters():
        assert torch.equal(torch.as_tensor(parameter.grad), torch.zeros_like(parameter))
    assert calls == []


@needs_compiler
@pytest.mark.parametrize("hooked", [False, True])
def test_evaluation_is_the_plain_layers(hooked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients the GELU writes over the first product, which nobody else has; a hook on it sees both."""
    torch.manual_seed(0)
    monkeypatch.setattr(module, "LARGE", 0)
    monkeypatch.setattr(guards, "LARGE", 0)
    experts = Experts(24, 64, 6)
    exact = copy.deepcopy(experts).double()
    apply(experts)
    x = torch.randn(6, 65, 24)
    before, seen = x.clone(), []
    if hooked:
        experts.gelu.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
    with torch.no_grad():
        torch.testing.assert_close(experts(x).double(), exact(x.double()), rtol=1e-5, atol=1e-5)
    assert torch.equal(x, before)
    assert [a.data_ptr() != b.data_ptr() for a, b in seen] == [True] * hooked


@needs_compiler
def test_what_they_do_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small weights, many rows, other types, lines of another length, tensors without numbers: the usual products."""
    w = torch.zeros(2, 3, 32)
    assert not module.kernel_supports(torch.zeros(2, 4, 3), w)
    monkeypatch.setattr(module, "LARGE", 0)
    assert module.kernel_supports(torch.zeros(2, 4, 3), w)
    assert not module.kernel_supports(torch.zeros(2, module.MAX_ROWS + 1, 3), w)
    assert not module.kernel_supports(torch.zeros(2, 4, 3).double(), w.double())
    assert not module.kernel_supports(torch.zeros(2, 4, 3), torch.zeros(2, 3, 33))
    assert not module.kernel_supports(torch.zeros(2, 4, 3), torch.zeros(2, 32, 3).transpose(1, 2))
    assert not module.kernel_supports(torch.zeros(2, 4, 3, device="meta"), w.to("meta"))


@needs_compiler
@pytest.mark.parametrize("case", ["one pass", "two passes", "changed", "used twice", "done with"])
def test_norm_of_gradients(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm is that of the gradients as they are; only what was left alone since it was written is not read."""
    torch.manual_seed(0)
    monkeypatch.setattr(module, "LARGE", 0)
    experts = Experts(24, 64, 6)
    optimizer = torch.optim.SGD(experts.parameters())
    apply(experts, optimizer)
    for _ in range(2 if case == "two passes" else 1):
        y = experts(torch.randn(6, 12, 24))
        y = experts(y) if case == "used twice" else y
        y.square().sum().backward()
    gradients = [torch.as_tensor(p.grad) for p in experts.parameters()]
    if case == "changed":
        gradients[0].mul_(3)
        experts.w2.grad = torch.ones_like(experts.w2)
        gradients = [torch.as_tensor(p.grad) for p in experts.parameters()]
    if case == "done with":
        optimizer.zero_grad()
        gradients = [torch.ones_like(g) for g in gradients]
    expected = torch.stack([g.double().norm() for g in gradients]).norm()
    read: list[Tensor] = []
    total = torch.nn.utils.get_total_norm
    monkeypatch.setattr(torch.nn.utils, "get_total_norm", lambda tensors: (read.extend(tensors), total(tensors))[1])
    torch.testing.assert_close(buffers.total_norm(gradients).double(), expected, rtol=1e-6, atol=0)
    assert len(read) == (2 if case == "one pass" else 4)


@given(*[st.integers(1, high) for high in (4, 5, 6, 7)], st.booleans(), st.integers(0, 2**31))
def test_products_of_any_size_are_autograds(N, S, I, O, transposed, seed):  # noqa: E741
    """In float64, for weights either way: outputs and gradients; the weight's gradient lies as the weight does."""
    torch.manual_seed(seed)
    shapes = ((N, S, I), (N, O, I) if transposed else (N, I, O), (N, O))
    x, w, b = inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    y = batched_linear(x, w, b, transposed)
    expected = x @ (w.transpose(1, 2) if transposed else w) + b.unsqueeze(1)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn_like(y)
    gradients = torch.autograd.grad(y, inputs, upstream)
    for one, other in zip(gradients, torch.autograd.grad(expected, inputs, upstream), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert gradients[1].is_contiguous()


@pytest.mark.parametrize("transposed", [False, True])
def test_products_can_be_derived_twice(transposed: bool) -> None:
    shapes = ((2, 3, 4), (2, 5, 4) if transposed else (2, 4, 5), (2, 5))
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradgradcheck(lambda *tensors: batched_linear(*tensors, transposed), inputs)


def test_only_asked_gradients_are_made() -> None:
    """A frozen weight, bias or input gets none."""
    x, w, b = torch.randn(2, 3, 4), torch.randn(2, 4, 5, requires_grad=True), torch.randn(2, 5)
    batched_linear(x, w, b, False).sum().backward()
    assert w.grad is not None
    assert x.grad is None
    assert b.grad is None


@needs_compiler
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_see_what_they_can_derive(monkeypatch: pytest.MonkeyPatch, transform: Callable[..., Tensor]) -> None:
    """Second derivatives, transforms and forward mode are those of torch."""
    monkeypatch.setattr(module, "LARGE", 0)
    experts = Experts(8, 32, 3)
    exact = copy.deepcopy(experts).double()
    apply(experts)

    def function(experts: Experts) -> Callable[[Tensor], Tensor]:
        return lambda x: experts(x.transpose(0, 1)).pow(3).sum()

    x = torch.randn(4, 3, 8)
    found, expected = transform(function(experts), x.clone()), transform(function(exact), x.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@needs_compiler
def test_wrong_slots_and_autocast_are_the_plain_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain layer's error for another shape, and its products under autocast."""
    monkeypatch.setattr(module, "LARGE", 0)
    experts = Experts(8, 32, 3)
    apply(experts)
    calls = used(monkeypatch)
    with pytest.raises(ValueError, match="expected slots of shape"):
        experts(torch.zeros(2, 4, 8))
    with torch.autocast("cpu", torch.float16):
        assert experts(torch.zeros(3, 4, 8)).dtype == torch.float16
    assert calls == []
