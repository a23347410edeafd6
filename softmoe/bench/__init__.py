"""Time the package on this machine, its parts and its rivals: medians of calls in turn.

Every row has its share of the roofline. A suite is a function of the roofline's probes that yields rows as they are
ready.
"""

from collections.abc import Callable, Iterator
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


def suite(name: str) -> "Callable[..., Iterator[Row]]":
    """Find the suite of that name: `suite(name)(probes, seconds=15.0)`, seconds for each group that takes turns."""
    module, _, function = SUITES[name].partition(":")
    return getattr(import_module(module), function)
