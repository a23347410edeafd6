"""What `softmoe bench` can time. A suite is a function of the roofline's probes that yields rows as they are ready."""

from collections.abc import Callable, Iterator
from importlib import import_module

from softmoe.bench.cases import Row

SUITES = {
    "layer": "softmoe.bench.cases:bench_layer",
    "model": "softmoe.bench.cases:bench_model",
    "train": "softmoe.bench.loop:bench_loop",
    "infer": "softmoe.bench.infer:bench_infer",
    "routers": "softmoe.bench.routers:bench_routers",
    "data": "softmoe.bench.loop:bench_data",
    "peers": "softmoe.bench.peer_models:bench_peers",
    "scaling": "softmoe.bench.scaling:bench_scaling",
}


def suite(name: str) -> Callable[..., Iterator[Row]]:
    """`suite(name)(probes, seconds=15.0)`: seconds for each group of functions that take turns."""
    module, _, function = SUITES[name].partition(":")
    return getattr(import_module(module), function)
