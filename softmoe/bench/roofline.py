"""What this machine can do at best: its rate of float32 products and its memory bandwidth, both measured."""

import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Roofline:
    flops_per_second: float
    bytes_per_second: float

    def seconds(self, flops: float, moved_bytes: float) -> float:
        """The least time for that much arithmetic and memory traffic: the slower of the two."""
        return max(flops / self.flops_per_second, moved_bytes / self.bytes_per_second)


def measure_roofline(repeats: int = 7) -> Roofline:
    """Best of several: a 2048-cubed product, and reading 512 MiB (a sum, the traffic of weights that are used once)."""
    size = 2048
    a, b = torch.randn(size, size), torch.randn(size, size)
    words = torch.ones(1 << 27)
    product = min(seconds_of(lambda: a @ b) for _ in range(repeats))
    read = min(seconds_of(words.sum) for _ in range(repeats))
    return Roofline(2 * size**3 / product, words.numel() * words.element_size() / read)


def seconds_of(function: Any) -> float:
    before = time.perf_counter()
    function()
    return time.perf_counter() - before


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
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def describe(roofline: Roofline) -> str:
    m = machine()
    return (
        f"{m['cpu']}, {m['cores']} cores, {m['threads']} threads, torch {m['torch']}, {m['capability']}: "
        f"{roofline.flops_per_second / 1e9:.0f} GFLOP/s, {roofline.bytes_per_second / 1e9:.1f} GB/s"
    )


def as_json(roofline: Roofline) -> dict[str, Any]:
    return {**machine(), **asdict(roofline)}
