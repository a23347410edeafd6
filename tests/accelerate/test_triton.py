"""Triton kernels by triton's interpreter on the CPU against float64: outputs and all gradients."""

from collections.abc import Callable, Iterator
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

import softmoe
from softmoe import accelerate
from softmoe.accelerate import fastest, triton_adamw, triton_experts, triton_soft
from softmoe.accelerate.optimizer import CompactAdamW, Flat, Workspace, in_pieces, update_together
from softmoe.accelerate.soft import LogitsRouting, keep_logits_only
from softmoe.moe import Experts, PlacedRouter, SoftRouter

triton = pytest.importorskip("triton", reason="needs triton: pip install 'softmoe-vit[dev]'")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),  # numpy's, of values that are masked
    # numpy's, of the interpreter of triton 3.5: from numpy 2.4 on that is an error
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Please use the new API settings:UserWarning"),  # torch 2.9's, of TF32
]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCE)


@pytest.fixture(autouse=True)
def _rounds_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter cuts float32 to bfloat16 where hardware rounds to the nearest: let it round."""
    from triton.runtime import interpreter

    plain = interpreter.InterpreterBuilder.cast_impl

    def cast(self, source, kind):
        if source.dtype.scalar == triton.language.float32 and kind.scalar == triton.language.bfloat16:
            bits = source.data.view(np.uint32)
            rounded = (bits + 0x7FFF + (bits >> 16 & 1)).astype(np.uint32).view(np.float32)
            source = interpreter.TensorHandle(np.where(np.isfinite(source.data), rounded, source.data), source.dtype)
        return plain(self, source, kind)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", cast)


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """The type of the numbers. Runs have TF32 beside bfloat16, and exact float32 products have tiles of their own."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = request.param == torch.bfloat16
    yield request.param
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture
def as_if_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Techniques take tensors of the CPU, and the kernel is always the faster way."""
    monkeypatch.setattr(fastest, "need_triton", lambda model: None)
    monkeypatch.setattr(fastest, "may_use", lambda *tensors: True)
    monkeypatch.setattr(fastest, "kernel_is_faster", lambda *_: True)


def run(way: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    output = way(*leaves)
    d_output = torch.cos(torch.arange(output.numel())).view_as(output).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, leaves, d_output)]


def check(plain: Callable[..., Tensor], kernels: Callable[..., Tensor], tensors: list[Tensor]) -> None:
    dtype = tensors[0].dtype
    right = run(plain, [t.double() for t in tensors])
    for found, expected, given in zip(run(kernels, tensors), right, [tensors[0], *tensors], strict=True):
        assert found.dtype == given.dtype
        assert (found.double() - expected).norm() <= TOLERANCE[dtype] * expected.norm() + 1e-12


@pytest.mark.parametrize(
    ("sizes", "masked", "normalize"),
    [
        ((2, 5, 6, 3, 2), False, True),
        ((1, 1, 1, 1, 1), False, True),
        ((3, 70, 133, 5, 1), True, True),
        ((2, 37, 130, 23, 3), True, False),
    ],
)
def test_soft_routing(sizes: tuple[int, ...], masked: bool, normalize: bool, dtype: torch.dtype) -> None:
    """Logits, dispatch and combine; sizes beyond a tile and odd ones; an image without any real token."""
    B, M, D, N, P = sizes
    x, slots = torch.randn(B, M, D, dtype=dtype), 3 * torch.randn(D, N * P) / D**0.5
    mask = None
    if masked:
        mask = torch.rand(B, M) < 0.6
        mask[0] = False
    ways = (partial(way, normalize, (N, P), mask) for way in (triton_soft.by_torch, triton_soft.by_kernels))
    check(*ways, [x, slots])  # pyright: ignore[reportCallIssue]


def test_masked_tokens_are_nothing() -> None:
    """What stands at masked tokens changes nothing, not even if it is no number, and they receive exactly zero."""
    x, slots, mask = torch.randn(2, 9, 8), torch.randn(8, 6), torch.rand(2, 9) < 0.5
    way = partial(triton_soft.by_kernels, True, (3, 2), mask)
    y = way(x, slots)
    column = mask[:1].expand(2, 9)  # without memory of its own
    assert torch.equal(triton_soft.by_kernels(True, (3, 2), column, x, slots)[0], y[0])
    assert torch.equal(way(torch.where(mask[..., None], x, 1e4 * x), slots), y)
    assert (y[~mask] == 0).all()


@pytest.mark.parametrize("sizes", [(2, 3, 5, 7), (1, 1, 1, 1), (3, 70, 130, 140)])
def test_experts(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """Two products, two biases and the activation; rows and widths beyond a tile and odd ones."""
    N, S, D, H = sizes
    x, b1, b2 = torch.randn(N, S, D), torch.randn(N, H), torch.randn(N, D)
    w1, w2 = torch.randn(N, D, H) * D**-0.5, torch.randn(N, D, H) * H**-0.5
    tensors = [t.to(dtype) for t in (x, w1, b1, w2, b2)]
    check(triton_experts.by_torch, triton_experts.by_kernels, tensors)


def test_rows_beyond_32_bits_are_left_to_torch() -> None:
    """More than 2^31 numbers of one expert, whose places the kernel could not count, are refused; of all it may be."""
    from softmoe.accelerate.kernels import product

    empty = partial(torch.empty, device="meta")
    weights, bias = empty(1, 4096, 16), empty(1, 16)
    with pytest.raises(ValueError, match="numbers an expert, got 524288 rows of 4096"):
        product.product(empty(1, 1 << 19, 4096), weights, bias)
    launches = []
    with patch.object(product, "launch", lambda *given, **_: launches.append(given)):
        product.product(empty(64, 1 << 18, 4096), weights.expand(64, -1, -1), bias.expand(64, -1))
    assert len(launches) == 1


def test_the_activation_at_its_ends() -> None:
    """Far from zero it is x or 0, and its slope 1 or 0, with no number that is none."""
    x = torch.tensor([-1e4, -30.0, -1e-3, 0.0, 1e-3, 30.0, 1e4]).view(1, -1, 1)
    ones, zeros = torch.ones(1, 1, 1), torch.zeros(1, 1)
    right = run(triton_experts.by_torch, [t.double() for t in (x, ones, zeros, ones, zeros)])[:2]
    found = run(triton_experts.by_kernels, [x, ones, zeros, ones, zeros])[:2]
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)


SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def moments(count: int) -> Flat:
    return Flat(torch.randn(count), torch.randn(count), *torch.rand(2, count).bfloat16())


def test_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is that of the update in pieces from the same state, rounded by the same random numbers."""
    monkeypatch.setattr("softmoe.accelerate.optimizer.PIECE", 700)
    room = Workspace(torch.device("cpu"))
    monkeypatch.setattr(triton_adamw, "noise_on", lambda device: room.numbers)
    state = moments(3001)
    for step in (1.0, 2.0, 90_000.0):
        ours, count = Flat(*(t.clone() for t in state)), torch.tensor(step - 1)
        in_pieces(state, room, torch.tensor(step), 5, SETTINGS)
        triton_adamw.update_each([(ours, count)], [5], SETTINGS, None)
        assert count.item() == step
        torch.testing.assert_close(ours.weight, state.weight, rtol=1e-6, atol=1e-7)
        for moment, right in ((ours.first, state.first), (ours.second, state.second)):
            assert (moment != right).float().mean() < 2e-3, "but for a few that lay at a limit"
            torch.testing.assert_close(moment.float(), right.float(), rtol=2**-7, atol=1e-8)


def test_adamw_of_many_parameters(as_if_cuda: None) -> None:
    """The hook of the optimizer updates all rows as torch's calls do; with the flag to skip, nothing at all."""
    layer = softmoe.SoftMoE(4, 2)
    optimizer = CompactAdamW(layer.parameters())
    triton_adamw.switch_on(layer, optimizer)
    assert optimizer.by_kernel is not None
    rows = [(moments(count), torch.tensor(3.0)) for count in (1, 40, 1500)]
    before = [(Flat(*(t.clone() for t in flat)), step.clone()) for flat, step in rows]
    assert optimizer.by_kernel(rows, [1, 2, 3], SETTINGS, torch.tensor(1.0))
    assert all(
        torch.equal(a, b) for new, old in zip(rows, before, strict=True) for a, b in zip(new[0], old[0], strict=True)
    )
    assert [step.item() for _, step in rows] == [3.0] * 3
    assert optimizer.by_kernel(rows, [1, 2, 3], SETTINGS, torch.tensor(0.0))
    update_together(before, SETTINGS, None)
    for (ours, step), (right, _) in zip(rows, before, strict=True):
        assert step.item() == 4.0
        torch.testing.assert_close(ours.weight, right.weight, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(ours.second.float(), right.second.float(), rtol=2**-7, atol=1e-8)


def test_techniques_change_nothing(as_if_cuda: None) -> None:
    """A layer with both computes what it did, outputs and gradients, and has its plain classes back when asked."""
    layer, x = softmoe.SoftMoE(12, 3, 2, 20), torch.randn(2, 7, 12)

    def outputs() -> list[Tensor]:
        y = layer(x, torch.arange(7).expand(2, 7) < 5)
        return [y, *torch.autograd.grad(y.square().sum(), list(layer.parameters()))]

    plain = outputs()
    triton_soft.switch_on(layer)
    triton_experts.switch_on(layer)
    assert type(layer.router) is triton_soft.TritonSoftRouter
    assert type(layer.experts) is triton_experts.TritonExperts
    for one, other in zip(outputs(), plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    accelerate.remove(layer)
    assert (type(layer.router), type(layer.experts)) == (SoftRouter, Experts)


def test_kernels_stay_where_logits_alone_are_kept(as_if_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a run, which asks for both: the kernels where they are faster, elsewhere torch, from the logits."""
    layer, x = softmoe.SoftMoE(16, 4, 2, 24), torch.randn(2, 9, 16)
    plain = layer(x)
    accelerate.apply(layer)
    assert keep_logits_only(layer) == keep_logits_only(layer) == 1
    assert type(layer.router(x)) is triton_soft.TritonRouting
    torch.testing.assert_close(layer(x), plain, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(fastest, "kernel_is_faster", lambda *_: False)
    assert type(layer.router(x)) is LogitsRouting
    torch.testing.assert_close(layer(x), plain)
    accelerate.remove(layer)
    assert type(layer.router) is SoftRouter


@pytest.mark.parametrize("combine_place", [True, False])
def test_a_placed_router_has_its_places(as_if_cuda: None, combine_place: bool) -> None:
    """The kernels see the logits with the places in them, and the places get their gradients."""
    router, x = PlacedRouter(8, 4, frame=True, combine_place=combine_place), torch.randn(2, 9, 8)
    torch.nn.init.normal_(router.frame.direction)
    wanted = [*router.parameters()]

    def outputs() -> list[Tensor]:
        routing = router(x, None, (3, 3))
        y = routing.combine(routing.dispatch(x).square())
        return [y, routing.dispatch_weights, *torch.autograd.grad(y.square().sum(), wanted)]

    plain = outputs()
    triton_soft.switch_on(router)
    assert type(router(x, None, (3, 3))) is triton_soft.TritonRouting
    for one, other in zip(outputs(), plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_compiler_takes_the_way_that_was_faster(as_if_cuda: None) -> None:
    """After an eager call the traced graph has the kernels' operators, in both passes, and gives the same."""
    layer, x = softmoe.SoftMoE(12, 3, 2, 20), torch.randn(2, 7, 12)
    triton_soft.switch_on(layer)
    triton_experts.switch_on(layer)
    eager = layer(x)
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        graphs.append(str(graph.graph))
        return graph

    y = torch.compile(layer, backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(y, eager)
    assert len(graphs) == 1
    assert all(name in graphs[0] for name in ("soft_logits", "soft_dispatch", "soft_combine", "triton_mlp"))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    gradients = []
    for way in (layer, compiled):
        layer.zero_grad()
        way(x).square().sum().backward()
        gradients.append([p.grad for p in layer.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_an_exported_file_has_no_operator_of_ours(as_if_cuda: None) -> None:
    """It runs without this package, also if the kernels were the faster way."""
    layer, x = softmoe.SoftMoE(12, 3, 2, 20), torch.randn(2, 7, 12)
    triton_soft.switch_on(layer)
    triton_experts.switch_on(layer)
    right = layer(x)
    program = torch.export.export(layer, (x,))
    assert "softmoe" not in str(program.graph)
    torch.testing.assert_close(program.module()(x), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["soft_logits", "soft_dispatch", "soft_combine", "triton_mlp"])
def test_operators_are_declared_right(name: str) -> None:
    """torch's own check of shapes without data, of autograd and of tracing."""
    f = partial(torch.randn, requires_grad=True)
    x, logits, slots = f(2, 5, 4), f(2, 5, 6), f(3, 4, 4)
    arguments = {
        "soft_logits": (x, f(4, 6), True),
        "soft_dispatch": (logits, torch.ones(2, 5, dtype=torch.bool), x, 2),
        "soft_combine": (logits, None, slots),
        "triton_mlp": (f(3, 4, 4), f(3, 4, 7), f(3, 7), f(3, 4, 7), f(3, 4), True),
    }
    torch.library.opcheck(getattr(torch.ops.softmoe, name).default, arguments[name])


def test_the_selftest_compares_every_kernel(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `softmoe selftest` tells of a device: each kernel by name, near to float64, and far if one is wrong."""
    cpu = torch.device("cpu")
    found = dict(fastest.kernel_errors(cpu, dtype))
    assert list(found) == ["soft routing", "experts", "AdamW"]
    assert found.pop("AdamW") < 5e-3  # of the moments, which are rounded
    assert max(found.values()) <= TOLERANCE[dtype]
    monkeypatch.setattr(triton_experts, "by_kernels", lambda x, *more: 1.1 * triton_experts.by_torch(x, *more))
    monkeypatch.setattr(triton_adamw, "update_each", lambda rows, *_: rows[0][0].weight.mul_(0.9))
    wrong = dict(fastest.kernel_errors(cpu, dtype))
    assert wrong["experts"] > 0.09
    assert wrong["AdamW"] > 0.09


def test_off_without_a_cuda_device() -> None:
    """On a CPU all three are off, with the reason, and classes stay."""
    layer = softmoe.SoftMoE(8, 2)
    optimizer = CompactAdamW(layer.parameters())
    reasons = {t.name: t.why for t in accelerate.apply(layer, optimizer).techniques if not t.on}
    assert {reasons[f"triton_{name}"] for name in ("soft", "experts", "adamw")} == {"not on a CUDA device"}
    assert type(layer.router) is SoftRouter
