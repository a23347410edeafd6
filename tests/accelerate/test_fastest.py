"""The right and faster one of torch's way and a kernel is used; the kernels compile for GPUs that are not here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import softmoe
from softmoe import accelerate
from softmoe.accelerate import fastest
from softmoe.accelerate.fastest import Choice, compare

triton = pytest.importorskip("triton", reason="needs triton: pip install 'softmoe-vit[dev]'")


def linear(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


def test_a_wrong_or_failing_kernel_is_not_used() -> None:
    """Numbers and gradients are compared before any time is taken; what cannot run is not used, with the reason."""
    inputs = (torch.randn(4, 3, requires_grad=True), torch.randn(3, 2, requires_grad=True))

    def wrong_gradient(x: Tensor, w: Tensor) -> Tensor:
        return x @ w + 0.5 * (x.sum() - x.sum().detach())

    def failing(x: Tensor, w: Tensor) -> Tensor:
        raise RuntimeError("out of resource: shared memory")

    assert "away from torch's" in compare(linear, wrong_gradient, inputs, True, 1e-3).why
    found = compare(linear, failing, inputs, True, 1e-3)
    assert (found.use, "shared memory" in found.why) == (False, True)
    assert "ms by the kernel" in compare(linear, torch.matmul, inputs, True, 1e-3).why


def test_out_of_memory_while_timing_is_no_error() -> None:
    """A kernel that ran once and then finds no memory is not used; the step goes on in torch's way."""
    calls = []

    def fails_later(x: Tensor, w: Tensor) -> Tensor:
        calls.append(x)
        if len(calls) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x @ w

    found = compare(linear, fails_later, (torch.randn(4, 3), torch.randn(3, 2)), False, 1e-3)
    assert (found.use, "out of memory" in found.why) == (False, True)


def test_timing_inside_a_block_that_is_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call for a shape, which tries both ways, may stand in a checkpointed block: gradients stay right."""
    monkeypatch.setattr(fastest, "CHOICES", {})
    x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))

    def block(x: Tensor, w: Tensor) -> Tensor:
        squares = x.square()
        fastest.kernel_is_faster("trial", linear, torch.matmul, squares, w)
        return (squares @ w).exp()

    right = torch.autograd.grad((x.square() @ w).exp().sum(), (x, w))
    found = torch.autograd.grad(checkpoint(block, x, w, use_reentrant=False).sum(), (x, w))
    assert len(fastest.CHOICES) == 1
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other)


def test_products_are_as_exact_as_torch_is_told() -> None:
    """Kernels multiply as torch does, by whichever of torch's two switches it was told."""
    from softmoe.accelerate.kernels.dot import precision

    before = torch.backends.cuda.matmul.fp32_precision
    found = []
    for value in ("tf32", "ieee"):
        torch.backends.cuda.matmul.fp32_precision = value
        found.append(precision())
    for value in (True, False):
        torch.backends.cuda.matmul.allow_tf32 = value
        found.append(precision())
    torch.backends.cuda.matmul.fp32_precision = before
    assert found == ["tf32", "ieee"] * 2


def test_each_shape_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found is kept by shape and by whether gradients are wanted, and is told in a line each."""
    asked = []
    monkeypatch.setattr(fastest, "CHOICES", {})
    monkeypatch.setattr(fastest, "compare", lambda *given: asked.append(given) or Choice(True, "kernel: 1 ms"))
    x = torch.randn(4, 3)
    assert fastest.kernel_is_faster("trial", linear, linear, x, x.T)
    assert fastest.kernel_is_faster("trial", linear, linear, x, x.T)
    assert fastest.kernel_is_faster("trial", linear, linear, x.requires_grad_(), x.T)
    assert len(asked) == 2
    assert accelerate.apply(torch.nn.Identity()).timed() == [
        "trial 4x3 3x4 float32: kernel: 1 ms",
        "trial 4x3 3x4 float32, with gradients: kernel: 1 ms",
    ]


def test_a_deterministic_run_chooses_nothing_by_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which way is faster may change from run to run, and bits with it: torch's is taken, and nothing is timed."""
    monkeypatch.setattr(fastest, "CHOICES", {})
    monkeypatch.setattr(fastest, "compare", lambda *_: Choice(True, "kernel: 1 ms"))
    x = torch.randn(4, 3)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert not fastest.kernel_is_faster("trial", linear, linear, x, x.T)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not fastest.CHOICES
    assert fastest.kernel_is_faster("trial", linear, linear, x, x.T)


COMPILED = """
import torch
from kernel_table import LARGEST_SHARED, NUMBERS, SIZES, launches, usage
wanted = {"bfloat16": ("dispatch", "combine, gradient of logits", "logits", "log-sum-exp over tokens", "AdamW",
                       "experts, first product and GELU, 64 rows", "experts, gradient of hidden rows, 64 rows"),
          "exact": ("dispatch", "logits", "experts, second product, 64 rows")}
for numbers, whats in wanted.items():
    dtype, torch.backends.cuda.matmul.allow_tf32 = NUMBERS[numbers]
    for launch in launches(*SIZES["H/14"], dtype):
        if launch.what in whats:
            for target, shared in LARGEST_SHARED.items():
                found = usage(launch, target)
                print(launch.what, target, found)
                assert found.registers > 0 and found.spilled == 0 and found.shared <= 1024 * shared
"""


def test_kernels_compile_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    """Machine code for sm_80 and sm_90 at the sizes of H/14, without spilled registers, with products in
    bfloat16 and exact ones in float32 (docs/gpu.md has the others)."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = Path(softmoe.__file__).parents[1]
    environment |= {"PYTHONPATH": os.pathsep.join([str(root), str(root / "tools")])}
    done = subprocess.run([sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 20
