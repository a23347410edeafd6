"""Time a kernel against torch, once for each shape on the device at hand, and use the faster of the two.

A kernel that cannot run there, or whose numbers are wrong there, is not used. The outcomes are in `CHOICES`.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from softmoe.accelerate.guards import Off, no_tangents, no_tracing_or_transforms

ROUNDS = 5
LARGEST_ERROR = {torch.float32: 5e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""By the type of the products (float32 ones may be TF32): the difference from torch's numbers, as a share of their
norm, beyond which a kernel is wrong."""
Implementation = Callable[..., Tensor]


@dataclass(frozen=True)
class Choice:
    """The choice for one shape: whether the kernel is used, and a sentence with both times or what failed."""

    use: bool
    why: str


CHOICES: dict[tuple[Any, ...], Choice] = {}
"""By name of the technique, shape, type, device, and whether gradients are wanted."""


def need_triton(model: nn.Module) -> None:
    """Raise Off unless the model is on a CUDA device and there is a triton to compile with."""
    if not any(p.device.type == "cuda" for p in model.parameters()):
        raise Off("not on a CUDA device")
    if find_spec("triton") is None:
        raise Off("triton is not installed")
    if torch.version.hip:
        raise Off("not tried on ROCm")


def may_use(*tensors: Tensor) -> bool:
    """True for tensors that a kernel takes, while nobody traces or transforms what is computed."""
    kinds = (Tensor, nn.Parameter)
    return (
        no_tracing_or_transforms()
        and all(type(t) in kinds and t.device.type == "cuda" and t.dtype in LARGEST_ERROR for t in tensors)
        and no_tangents(*tensors)
    )


def kernel_is_faster(name: str, plain: Implementation, kernel: Implementation, *inputs: Tensor) -> bool:
    """True if the kernel is faster for such inputs: the first call for a shape times both.

    Where algorithms must be deterministic it is never used: which is faster may change from run to run.
    """
    if torch.are_deterministic_algorithms_enabled():
        return False
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    device = inputs[0].device
    kind = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else inputs[0].dtype
    key = (name, *(tuple(t.shape) for t in inputs), kind, device, grad)
    if key not in CHOICES:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        CHOICES[key] = too_old(device) or compare(plain, kernel, inputs, grad, LARGEST_ERROR[kind])
    return CHOICES[key].use


def too_old(device: torch.device) -> Choice | None:
    """Return a refusal for GPUs without products of bfloat16, on which triton's compiler may end the process."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return Choice(False, "torch: the kernels need compute capability 8.0")
    return None


def compare(
    plain: Implementation, kernel: Implementation, inputs: tuple[Tensor, ...], grad: bool, largest_error: float
) -> Choice:
    """Run both on copies of the inputs, with gradients if they are wanted: numbers first, then times in turn."""
    times: dict[Implementation, list[float]] = {plain: [], kernel: []}
    try:
        right, found = (outputs_and_gradients(way, inputs, grad) for way in (plain, kernel))
        error = max(distance(one.float(), other.float()) for one, other in zip(found, right, strict=True))
        if not error <= largest_error:
            return Choice(False, f"torch: the kernel's numbers are {error:.1e} away from torch's")
        del right, found  # in the middle of a first step memory may be short
        for _ in range(ROUNDS):
            for way, taken in times.items():
                taken.append(_seconds(way, inputs, grad))
    except Exception as error:  # whatever a compiler, a driver or a full device may raise: torch's way is there
        return Choice(False, f"torch: the kernel cannot run here ({type(error).__name__}: {str(error)[:80]})")
    torch_time, own_time = (statistics.median(times[way]) for way in (plain, kernel))
    use = own_time < torch_time
    share = f"{1e3 * own_time:.3f} ms by the kernel, {1e3 * torch_time:.3f} ms by torch"
    return Choice(use, f"{'kernel' if use else 'torch'}: {share}")


def outputs_and_gradients(way: Implementation, inputs: tuple[Tensor, ...], grad: bool) -> list[Tensor]:
    """Return the output on copies of the inputs and, for an output gradient of ones, the gradients of the inputs.

    Tensors that are saved for them are hidden from other hooks: activation checkpointing counts those saved in the
    first pass, and a trial that is not repeated in the second would mix them up.
    """
    hidden = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with torch.set_grad_enabled(grad), hidden:
        copies = [t.detach().requires_grad_(grad and t.requires_grad) for t in inputs]
        output = way(*copies)
        wanted = [t for t in copies if t.requires_grad]
        gradients = torch.autograd.grad(output, wanted, torch.ones_like(output)) if wanted else ()
    return [output.detach(), *gradients]


def _seconds(way: Implementation, inputs: tuple[Tensor, ...], grad: bool) -> float:
    if inputs[0].device.type != "cuda":
        begun = time.perf_counter()
        outputs_and_gradients(way, inputs, grad)
        return time.perf_counter() - begun
    with torch.cuda.device_of(inputs[0]):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        outputs_and_gradients(way, inputs, grad)
        end.record()
        end.synchronize()
    return begin.elapsed_time(end) / 1e3


def distance(one: Tensor, other: Tensor) -> float:
    """Return the norm of the difference as a share of the norm of `other`."""
    return float((one - other).norm() / other.norm().clamp(min=1e-30))


def kernel_errors(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    """Yield how far each kernel on the device is from float64 on the CPU, as a share of the norm.

    Soft routing and experts are compared with gradients and with products in `dtype`, AdamW by the weights and
    (bfloat16) moments after a first step.
    """
    from softmoe.accelerate import triton_adamw, triton_experts, triton_soft

    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), device="cpu")
    mask, shapes = draw(3, 70) < 0.5, ((4, 70, 136), (4, 136, 72), (4, 72), (4, 136, 72), (4, 136))
    soft = [
        partial(way, True, (25, 2), mask.to(place))
        for way, place in ((triton_soft.by_torch, "cpu"), (triton_soft.by_kernels, device))
    ]
    experts = [draw(shape).to(dtype) / (10 if len(shape) == 3 and shape[1] == 136 else 1) for shape in shapes]
    for name, plain, kernel, inputs in (
        ("soft routing", *soft, [draw(3, 70, 136).to(dtype), draw(136, 50)]),
        ("experts", triton_experts.by_torch, triton_experts.by_kernels, experts),
    ):
        right = outputs_and_gradients(plain, tuple(t.double().requires_grad_() for t in inputs), True)
        found = outputs_and_gradients(kernel, tuple(t.to(device).requires_grad_() for t in inputs), True)
        yield name, max(distance(a.cpu().double(), b) for a, b in zip(found, right, strict=True))
    weight, gradient = draw(2, 5000)
    right = triton_adamw.first_step_exactly(weight.double(), gradient.double())
    moments = torch.zeros(2, 5000, dtype=torch.bfloat16, device="cpu")
    rows = (row.to(device) for row in (weight, gradient, *moments))
    found = triton_adamw.first_step(triton_adamw.update_each, *rows).cpu().double()
    yield "AdamW", max(distance(a, b) for a, b in zip(found.chunk(3), right, strict=True))


def timings() -> list[str]:
    """Return a line for each shape that was timed so far."""
    return [
        f"{key[0]} {' '.join('x'.join(map(str, part)) for part in key[1:-3])} {key[-3]}".replace("torch.", "")
        + f"{', with gradients' if key[-1] else ''}: {choice.why}"
        for key, choice in CHOICES.items()
    ]
