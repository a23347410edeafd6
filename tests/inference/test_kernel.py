"""The compiled product against torch's, and what happens without a compiler."""

import ctypes
import platform

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from softmoe.accelerate import build
from softmoe.inference import layers
from softmoe.inference.layers import KERNEL, ByteDense, ByteLinear, PackedLinear, product_dtype

needs_compiler = pytest.mark.skipif(not KERNEL.available, reason=f"no compiled product: {KERNEL.why_not()}")
SHAPES = st.tuples(st.integers(1, 3), st.integers(0, 15), st.integers(1, 9), st.integers(1, 140))


def made(shape: tuple[int, int, int, int], weights) -> tuple[PackedLinear, torch.Tensor]:
    N, S, K, C = shape
    w, b = torch.randn(N, K, C), torch.randn(N, C)
    return PackedLinear(w.__getitem__, (N, K, C), b, weights), torch.randn(N, S, K)


def plain(layer: PackedLinear, x: torch.Tensor) -> torch.Tensor:
    """The rounded matrices in float64."""
    matrices = torch.stack([layer.matrix(n) for n in range(len(x))]).double()
    return x.double() @ matrices + layer.bias.unsqueeze(1).double()


@needs_compiler
@pytest.mark.parametrize("weights", ["float32", "float16", "bfloat16", "int8"])
@settings(max_examples=25)
@given(shape=SHAPES)
def test_compiled_equals_plain(shape, weights):
    """Any number of matrices, rows, inputs and outputs, also no row and panels that are not full: 1e-5."""
    layer, x = made(shape, weights)
    torch.testing.assert_close(layer(x), plain(layer, x).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weights", ["float32", "float16", "bfloat16", "int8"])
@settings(max_examples=15)
@given(shape=SHAPES)
def test_torch_equals_plain(shape, weights):
    """The form that needs no compiler gives the same."""
    layer, x = made(shape, weights)
    torch.testing.assert_close(layer.by_groups(x), plain(layer, x).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_no_loop_over_matrices(weights, monkeypatch):
    """Without a compiled product three matrices and thirty take one product; more than GROUP bytes take several."""
    products = []
    plain_bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *given: products.append(given) or plain_bmm(*given))
    for count in (3, 30):
        layer, x = made((count, 2, 5, 70), weights)
        layer.by_groups(x)
    assert len(products) == 2
    monkeypatch.setattr("softmoe.inference.layers.GROUP", 4 * 5 * 70 * 10)
    torch.testing.assert_close(layer.by_groups(x), plain(layer, x).float(), rtol=1e-5, atol=1e-5)
    assert len(products) == 5


def test_types_of_products():
    """On a GPU bytes are multiplied in bfloat16 and other weights in their own type; on a CPU all in float32."""
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert [product_dtype(t, gpu) for t in (torch.int8, torch.float16)] == [torch.bfloat16, torch.float16]
    assert product_dtype(torch.bfloat16, cpu) == torch.float32


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86")
@pytest.mark.parametrize("flag", ["-march=x86-64-v3", "-march=x86-64"])
def test_older_processors(flag):
    """The forms for processors with AVX2, and with neither, are right too (this machine can run both)."""
    if "avx2" not in build.processor():
        pytest.skip("this processor has no AVX2")
    library = ctypes.CDLL(str(build.build(KERNEL.source, (flag,))))
    assert KERNEL.self_test(library)
    layer, x = made((2, 7, 5, 100), "float16")
    layer.packed[0, 0, 0, :4] = torch.tensor([6e-8, -3e-6, 65504.0, -0.0]).half()  # subnormal and largest numbers
    torch.testing.assert_close(layers.product(library, x, layer.packed, None, layer.bias), layer.by_groups(x))


@needs_compiler
def test_built_once(tmp_path, monkeypatch):
    """One file, used again as it is; nothing half-written beside it."""
    monkeypatch.setenv("SOFTMOE_CACHE", str(tmp_path))
    first = build.build(KERNEL.source)
    before = first.stat().st_mtime_ns
    assert build.build(KERNEL.source) == first
    assert first.stat().st_mtime_ns == before
    assert list((tmp_path / "kernels").iterdir()) == [first]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SOFTMOE_ACCELERATE": "off"}, "turned off by SOFTMOE_ACCELERATE"),
        ({"PATH": "", "CXX": ""}, r"no C\+\+ compiler"),
        ({"CXX": "false"}, "false failed"),
        ({"SOFTMOE_CACHE": "/dev/null/x"}, "cannot be kept in"),
    ],
)
def test_without_a_compiler(variables, message, tmp_path, monkeypatch):
    """Layers work all the same, and the reason is there to be read."""
    monkeypatch.setenv("SOFTMOE_CACHE", str(tmp_path))
    monkeypatch.delenv("SOFTMOE_ACCELERATE", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    KERNEL.forget()
    try:
        if "CXX" in variables or "PATH" in variables or build.shutil.which("g++") or "SOFTMOE_ACCELERATE" in variables:
            assert not KERNEL.available
            with pytest.raises(AssertionError, match=message):
                raise AssertionError(KERNEL.why_not())
        layer, x = made((2, 3, 4, 70), "int8")
        torch.testing.assert_close(layer(x), plain(layer, x).float(), rtol=1e-5, atol=1e-5)
    finally:
        KERNEL.forget()


@needs_compiler
def test_compiles_into_a_graph():
    """torch.export sees one operator, with the right shape."""
    layer, x = made((2, 3, 4, 70), "int8")
    program = torch.export.export(layer.eval(), (x,), dynamic_shapes=({1: torch.export.Dim("rows")},))
    more = torch.randn(2, 5, 4)
    torch.testing.assert_close(program.module()(more), layer(more))


needs_bytes = pytest.mark.skipif(not layers.has_bytes(), reason="no product of bytes on this processor")


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Each row to 256 steps from its smallest to its largest number, in float64."""
    x = x.double()
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    step = torch.where(high > low, (high - low) / 255, 1.0)
    return low + step * ((x - low) / step).round()


@needs_bytes
@settings(max_examples=40)
@given(shape=SHAPES)
def test_bytes_equal_plain(shape):
    """The product of bytes is that of the rounded rows with the rounded weights, to a step."""
    N, S, K, C = shape
    w, b, x = torch.randn(N, K, C), torch.randn(N, C), 3 * torch.randn(N, S, K)
    layer = ByteLinear(w.__getitem__, (N, K, C), b)
    matrices = torch.stack([layer.matrix(n) for n in range(N)]).double()
    expected = (rounded(x) if S else x.double()) @ matrices + b.unsqueeze(1).double()
    step = (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)) / 255 if S else torch.zeros(N, 0, 1)
    slack = step * matrices.abs().amax(1, keepdim=True).float() + 1e-4
    assert ((layer(x) - expected.float()).abs() <= slack).all()


@needs_bytes
def test_bytes_of_odd_rows():
    """Constant rows are exact to rounding; a row with nan or inf gives nan, and no other row does."""
    w, b = torch.randn(1, 6, 70), torch.randn(1, 70)
    layer = ByteLinear(w.__getitem__, (1, 6, 70), b)
    x = torch.randn(1, 4, 6)
    x[0, 0], x[0, 1, 3], x[0, 2, 5] = 2.5, float("nan"), float("inf")
    y = layer(x)
    torch.testing.assert_close(y[0, 0], (2.5 * layer.matrix(0).sum(0) + b[0]), rtol=1e-5, atol=1e-5)
    assert not y[0, 1:3].isfinite().any()
    assert y[0, 3].isfinite().all()


@needs_bytes
def test_bytes_instead_of_a_linear():
    """Any leading shape, with and without a bias, within two percent of the linear."""
    for bias in (True, False):
        linear = torch.nn.Linear(32, 20, bias=bias)
        x = torch.randn(2, 3, 5, 32)
        with torch.no_grad():
            ours, plain = ByteDense(linear)(x), linear(x)
        assert ours.shape == plain.shape
        assert (ours - plain).norm() / plain.norm() < 0.02


def test_bytes_without_the_instruction(monkeypatch):
    """A sentence, not a crash."""
    monkeypatch.setattr(layers, "has_bytes", lambda: False)
    with pytest.raises(ValueError, match=r"int8_dynamic needs the compiled product .* use int8"):
        ByteLinear(torch.randn(1, 4, 4).__getitem__, (1, 4, 4), torch.randn(1, 4))
