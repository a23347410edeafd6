"""`softmoe bench layer|model|routers|infer|train|data`: timings, with their share of the roofline."""

from pathlib import Path
from typing import Annotated, Literal

import tyro


def run(
    what: Annotated[Literal["layer", "model", "routers", "infer", "train", "data"], tyro.conf.Positional],
    forward_only: bool = False,
    seconds: float = 15.0,
    json: Path | None = None,
) -> None:
    """Time the layer (against peers), whole models, the routers, the training loop, or reading images.

    Args:
        what: layer, model, routers, infer (prepared models), train (the loop against the bare step) or data (images a
            second on one core).
        forward_only: Leave out the train steps.
        seconds: Time for each group of functions that are compared with each other.
        json: Also write the rows here.
    """
    from softmoe.bench.cases import Row, bench_layer, bench_model, bench_routers
    from softmoe.bench.peers import available_peers
    from softmoe.bench.report import save, table
    from softmoe.bench.roofline import Probes, describe, measure_roofline

    roofline = measure_roofline()
    print(describe(roofline), flush=True)
    if what in ("train", "data"):
        print_loop(what)
        return
    if what == "layer":
        print(*available_peers()[1], sep="\n", flush=True)
        found = bench_layer(Probes(), train=not forward_only, seconds=seconds)
    elif what == "infer":
        from softmoe.bench.infer import bench_infer

        found = bench_infer(Probes(), seconds=seconds)
    elif what == "model":
        found = bench_model(Probes(), train=not forward_only, seconds=seconds)
    else:
        found = bench_routers(Probes(), seconds=seconds)
    rows: list[Row] = []
    for line in table(rows.append(row) or row for row in found):
        print(line, flush=True)
    if json is not None:
        save(rows, roofline, json)


def print_loop(what: str) -> None:
    from softmoe.bench.loop import bench_data, bench_loop

    if what == "data":
        for name, images in bench_data():
            print(f"{name:<40} {images:8.0f} images/s", flush=True)
        return
    for name, bare, fed in bench_loop():
        print(f"{name:<20} bare step {1e3 * bare.median:7.2f} ms ± {100 * bare.spread:.1f} %", end="   ")
        print(
            f"with data {1e3 * fed.median:7.2f} ms ± {100 * fed.spread:.1f} %   {bare.median / fed.median:.3f}",
            flush=True,
        )


def main(argv: list[str]) -> int:
    tyro.cli(run, prog="softmoe bench", args=argv)
    return 0
