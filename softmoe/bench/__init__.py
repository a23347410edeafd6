"""Benchmarks of the package, its parts and its rivals on this machine: medians of calls that take turns.

A suite is a function that gets the probes of the roofline and yields rows as they are ready, each with its share of the
roofline.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from softmoe.bench.cases import Row
    from softmoe.machine import Precision

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
def timed_on(device: str, what: str, precision: "Precision" = "float32") -> Iterator[None]:
    """Create tensors on that device in this context, with products in that precision. ValueError if it cannot be."""
    import torch

    from softmoe.machine import choose_device, choose_precision

    place = choose_device(device)
    if place.type == "cpu":
        if precision == "bfloat16":
            raise ValueError(f"{precision} is timed on a GPU: add --device cuda")
        yield
        return
    if place.type != "cuda" or what not in ON_CUDA:
        raise ValueError(f"on cuda one can time {', '.join(ON_CUDA)}, not {what} on {device}")
    dtype = choose_precision(precision, place)  # float32 is TF32's there, as in training
    if precision == "bfloat16" and dtype is None:
        raise ValueError(f"{torch.cuda.get_device_name(place)} has no products of bfloat16: use --precision float32")
    with torch.device(place), torch.autocast("cuda", dtype, enabled=dtype is not None):
        yield


def suite(name: str) -> "Callable[..., Iterator[Row]]":
    """Return the suite of that name, to be called as `suite(name)(probes, seconds=15.0)`: seconds for each case."""
    module, _, function = SUITES[name].partition(":")
    return getattr(import_module(module), function)
