"""How fast this device multiplies matrices: the 100 % of the progress line's share of peak."""

import time
from functools import cache

import torch

_SIDE = {"cpu": 1024}


@cache
def peak_flops(device: torch.device, dtype: torch.dtype | None = None, tries: int = 5) -> float:
    """Best rate of a square product in FLOPs per second, measured once per process in about a tenth of a second."""
    side = _SIDE.get(device.type, 8192)
    with torch.no_grad():
        x = torch.ones(side, side, device=device, dtype=dtype or torch.float32)
        best = float("inf")
        for _ in range(tries):
            wait(device)
            start = time.perf_counter()
            torch.mm(x, x)
            wait(device)
            best = min(best, time.perf_counter() - start)
    return 2.0 * side**3 / best


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
