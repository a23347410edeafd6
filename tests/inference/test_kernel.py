"""The compiled product against torch's, and what happens without a compiler."""

import ctypes
import platform

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from softmoe.inference import kernel
from softmoe.inference.packed import PackedLinear

needs_compiler = pytest.mark.skipif(not kernel.available(), reason=f"no compiled product: {kernel.why_not()}")
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
    torch.testing.assert_close(layer.one_by_one(x), plain(layer, x).float(), rtol=1e-5, atol=1e-5)


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86")
@pytest.mark.parametrize("flag", ["-march=x86-64-v3", "-march=x86-64"])
def test_older_processors(flag, tmp_path, monkeypatch):
    """The forms for processors with AVX2, and with neither, are right too (this machine can run both)."""
    if "avx2" not in kernel._processor():
        pytest.skip("this processor has no AVX2")
    monkeypatch.setenv("SOFTMOE_CACHE", str(tmp_path))
    library = ctypes.CDLL(str(kernel.build((flag,))))
    assert kernel._right(library)
    layer, x = made((2, 7, 5, 100), "float16")
    layer.packed[0, 0, 0, :4] = torch.tensor([6e-8, -3e-6, 65504.0, -0.0]).half()  # subnormal and largest numbers
    torch.testing.assert_close(kernel.call(library, x, layer.packed, None, layer.bias), layer.one_by_one(x))


@needs_compiler
def test_built_once(tmp_path, monkeypatch):
    """One file, used again as it is; nothing half-written beside it."""
    monkeypatch.setenv("SOFTMOE_CACHE", str(tmp_path))
    first = kernel.build()
    before = first.stat().st_mtime_ns
    assert kernel.build() == first
    assert first.stat().st_mtime_ns == before
    assert list((tmp_path / "kernels").iterdir()) == [first]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SOFTMOE_KERNEL": "off"}, "turned off by SOFTMOE_KERNEL"),
        ({"PATH": "", "CXX": ""}, r"no C\+\+ compiler"),
        ({"CXX": "false"}, "false failed"),
        ({"SOFTMOE_CACHE": "/dev/null/x"}, "cannot be kept in"),
    ],
)
def test_without_a_compiler(variables, message, tmp_path, monkeypatch):
    """Layers work all the same, and the reason is there to be read."""
    monkeypatch.setenv("SOFTMOE_CACHE", str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    kernel._library.cache_clear()
    try:
        if "CXX" in variables or "PATH" in variables or kernel.shutil.which("g++") or "SOFTMOE_KERNEL" in variables:
            assert not kernel.available()
            with pytest.raises(AssertionError, match=message):
                raise AssertionError(kernel.why_not())
        layer, x = made((2, 3, 4, 70), "int8")
        torch.testing.assert_close(layer(x), plain(layer, x).float(), rtol=1e-5, atol=1e-5)
    finally:
        kernel._library.cache_clear()


@needs_compiler
def test_compiles_into_a_graph():
    """torch.export sees one operator, with the right shape."""
    layer, x = made((2, 3, 4, 70), "int8")
    program = torch.export.export(layer.eval(), (x,), dynamic_shapes=({1: torch.export.Dim("rows")},))
    more = torch.randn(2, 5, 4)
    torch.testing.assert_close(program.module()(more), layer(more))
