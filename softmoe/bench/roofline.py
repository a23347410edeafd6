"""What torch can do on this machine: its rate of float32 products and its memory bandwidth, both measured."""

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from softmoe.bench.timing import Timing, interleave
from softmoe.machine import first_core


@dataclass(frozen=True)
class Roofline:
    flops_per_second: float
    bytes_per_second: float

    def seconds(self, flops: float, moved_bytes: float) -> float:
        """The least time for that much arithmetic and memory traffic: the slower of the two."""
        return max(flops / self.flops_per_second, moved_bytes / self.bytes_per_second)


class Probes:
    """The two functions whose speed is the roofline. Timed in turn with what they judge: a busy machine slows all.

    A product of two 2048-square matrices, and reading 256 MiB (a sum: the traffic of weights that are used once).
    """

    SIZE, WORDS = 2048, 1 << 26
    PRODUCT, READ = "(product)", "(read)"

    def __init__(self) -> None:
        self.a, self.b = torch.randn(self.SIZE, self.SIZE), torch.randn(self.SIZE, self.SIZE)
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
    """What a reader needs to place the figures."""
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "environment": {
            key: os.environ[key] for key in sorted(os.environ) if key.startswith(("OMP_", "ONEDNN_", "THP_"))
        },
    }


def cpu_name() -> str:
    return first_core().get("model name") or platform.processor() or platform.machine()


def describe(roofline: Roofline) -> str:
    m = machine()
    return (
        f"{m['cpu']}, {m['cores']} cores, {m['threads']} threads, torch {m['torch']}, {m['capability']}: "
        f"{roofline.flops_per_second / 1e9:.0f} GFLOP/s, {roofline.bytes_per_second / 1e9:.1f} GB/s"
    )


def as_json(roofline: Roofline) -> dict[str, Any]:
    return {**machine(), **asdict(roofline)}
