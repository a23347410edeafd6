"""Time the package on this machine, its parts and its rivals: medians of calls in turn.

Every row has its share of the roofline. A suite is a function of the roofline's probes that yields rows as they are
ready.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from softmoe.bench.cases import Row

SUITES = {
    "layer": "softmoe.bench.peers:bench_layer",
    "model": "softmoe.bench.cases:bench_model",
    "train": "softmoe.bench.loop:bench_loop",
    "infer": "softmoe.bench.cases:bench_infer",
    "routers": "softmoe.bench.cases:bench_routers",
    "data": "softmoe.bench.loop:bench_data",
    "peers": "softmoe.bench.peers:bench_peers",
    "scaling": "softmoe.bench.cases:bench_scaling",
}


ON_CUDA = ("layer", "model", "infer", "routers", "scaling")
"""The suites that can be timed on a GPU; the others measure the processor, its files or whole processes."""


@contextmanager
def timed_on(device: str, what: str, precision: str = "float32") -> Iterator[None]:
    """Make every tensor inside on that device, with products in that precision. ValueError where it cannot be used."""
    import torch

    from softmoe.machine import choose_device

    place = choose_device(device)
    if place.type == "cpu":
        if precision != "float32":
            raise ValueError(f"{precision} is timed on a GPU: add --device cuda")
        yield
        return
    if place.type != "cuda" or what not in ON_CUDA:
        raise ValueError(f"on cuda one can time {', '.join(ON_CUDA)}, not {what} on {device}")
    with torch.device(place), torch.autocast("cuda", torch.bfloat16, enabled=precision == "bfloat16"):
        yield


def suite(name: str) -> "Callable[..., Iterator[Row]]":
    """Find the suite of that name: `suite(name)(probes, seconds=15.0)`, seconds for each group that takes turns."""
    module, _, function = SUITES[name].partition(":")
    return getattr(import_module(module), function)
