"""Time several functions fairly on a noisy machine (in turn, many times, medians), and compare with the roofline.

The roofline is the time of the least work of a step, its arithmetic and memory traffic that no implementation can
avoid, at the rates that torch reaches on this machine.

Letters: B images, M tokens, D width, H hidden width, N experts, P slots per expert.
"""

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from softmoe.machine import first_core

WORD = 4  # bytes of a float32


@dataclass(frozen=True)
class Timing:
    """The seconds of one call. `spread` is half the distance between the quartiles, as a fraction of the median."""

    median: float
    spread: float
    rounds: int


def interleave(
    functions: Mapping[str, Callable[[], object]], *, rounds: int = 9, seconds: float = 20.0
) -> dict[str, Timing]:
    """Time every function once a round, each round starting with another one, until rounds or seconds are used up.

    Functions timed together can be compared, since they saw the same machine. At least three rounds are run.
    """
    names = list(functions)
    for name in names:
        functions[name]()  # warm-up: allocations, lazy initialization
    taken: dict[str, list[float]] = {name: [] for name in names}
    start = time.perf_counter()
    for index in range(rounds):
        for shift in range(len(names)):
            name = names[(index + shift) % len(names)]
            taken[name].append(seconds_of(functions[name]))
        if index >= 2 and time.perf_counter() - start > seconds:
            break
    return {name: summarize(values) for name, values in taken.items()}


def seconds_of(function: Callable[[], object]) -> float:
    """Time one call; on a CUDA device by two events, after all earlier work is done."""
    if not on_cuda():
        before = time.perf_counter()
        function()
        return time.perf_counter() - before
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def on_cuda() -> bool:
    """Tell if the default device is a CUDA device: suites name no device, so `with torch.device(...)` chooses it."""
    return torch.get_default_device().type == "cuda"


def allocated_by(function: Callable[[], object]) -> int:
    """Return the most bytes that a call allocates on the CUDA device at once."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def summarize(values: list[float]) -> Timing:
    median = statistics.median(values)
    quartiles = statistics.quantiles(values, n=4) if len(values) > 2 else [min(values), median, max(values)]
    return Timing(median, (quartiles[2] - quartiles[0]) / 2 / median, len(values))


@dataclass(frozen=True)
class Roofline:
    flops_per_second: float
    bytes_per_second: float

    def seconds(self, flops: float, moved_bytes: float) -> float:
        """Return the least time for that much arithmetic and memory traffic: the slower of the two."""
        return max(flops / self.flops_per_second, moved_bytes / self.bytes_per_second)


class Probes:
    """Two functions whose speed gives the roofline, timed in turn with the others since a busy machine slows all.

    They multiply two matrices of side 2048, and read 256 MiB (by a sum, like weights that are used once). On a CUDA
    device the side is 8192, the product in the type of autocast, and the memory 1 GiB.
    """

    SIZE, WORDS = 2048, 1 << 26
    PRODUCT, READ = "(product)", "(read)"

    def __init__(self) -> None:
        if on_cuda():
            self.SIZE, self.WORDS = 8192, 1 << 28
        self.a, self.b = torch.randn(self.SIZE, self.SIZE), torch.randn(self.SIZE, self.SIZE)
        if torch.is_autocast_enabled(self.a.device.type):
            self.a, self.b = (t.to(torch.get_autocast_dtype(t.device.type)) for t in (self.a, self.b))
        self.words = torch.ones(self.WORDS)

    def functions(self) -> dict[str, Callable[[], object]]:
        return {self.PRODUCT: lambda: self.a @ self.b, self.READ: self.words.sum}

    def roofline(self, timings: Mapping[str, Timing]) -> Roofline:
        bytes_read = self.words.numel() * self.words.element_size()
        return Roofline(2 * self.SIZE**3 / timings[self.PRODUCT].median, bytes_read / timings[self.READ].median)


def measure_roofline(rounds: int = 7) -> Roofline:
    probes = Probes()
    return probes.roofline(interleave(probes.functions(), rounds=rounds))


def machine() -> dict[str, Any]:
    """Collect the facts of the machine that its timings depend on."""
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **gpu_facts(),
        "environment": {
            key: os.environ[key] for key in sorted(os.environ) if key.startswith(("OMP_", "ONEDNN_", "THP_"))
        },
    }


def gpu_facts() -> dict[str, Any]:
    """Return the CUDA device that is timed and the type of its products; nothing if the processor is timed."""
    if not on_cuda():
        return {}
    autocast = str(torch.get_autocast_dtype("cuda")) if torch.is_autocast_enabled("cuda") else "torch.float32"
    tf32 = ", TF32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else ""
    return {"gpu": torch.cuda.get_device_name(), "products": autocast.removeprefix("torch.") + tf32}


def cpu_name() -> str:
    return first_core().get("model name") or platform.processor() or platform.machine()


def machine_line(roofline: Roofline) -> str:
    """Name the machine and its two rates in one line."""
    m = machine()
    gpu = f"{m['gpu']} ({m['products']}), " if "gpu" in m else ""
    threads = f"{m['threads']} thread{'s' if m['threads'] > 1 else ''}"
    return (
        f"{gpu}{m['cpu']}, {m['cores']} cores, {threads}, torch {m['torch']}, {m['capability']}: "
        f"{roofline.flops_per_second / 1e9:.0f} GFLOP/s, {roofline.bytes_per_second / 1e9:.1f} GB/s"
    )


def machine_facts(roofline: Roofline) -> dict[str, Any]:
    return {**machine(), **asdict(roofline)}


@dataclass(frozen=True)
class Work:
    """The least work of a forward pass: multiply-accumulates, parameters read once, and inputs and outputs."""

    macs: float
    params: float
    in_out: float

    def forward(self) -> tuple[float, float]:
        """Return (FLOPs, bytes)."""
        return 2 * self.macs, WORD * (self.params + self.in_out)

    def train(self) -> tuple[float, float]:
        """Return (FLOPs, bytes) of forward, backward and AdamW.

        Parameters are read by the forward and the backward pass and the gradient is written (3 words); AdamW reads
        parameter, gradient and two moments and writes all but the gradient (7 words). Inputs, outputs and their
        gradients cross memory once each.
        """
        return 6 * self.macs, WORD * (10 * self.params + 2 * self.in_out)


def soft_layer(B: int, M: int, D: int, H: int, N: int, P: int) -> Work:
    routing = 3 * M * D * N * P
    experts = 2 * N * P * D * H
    return Work(B * (routing + experts), N * (2 * D * H + H + D) + D * N * P + 1, 2 * B * M * D)


def sparse_layer(B: int, M: int, D: int, H: int, N: int, capacity: int) -> Work:
    """Count a sparse layer, one image a group: the gate, and every slot through its expert."""
    return Work(B * (M * D * N + 2 * N * capacity * D * H), N * (2 * D * H + H + D) + D * N, 2 * B * M * D)


def mlp(rows: int, D: int, H: int) -> Work:
    return Work(2 * rows * D * H, 2 * D * H + H + D, 2 * rows * D)
