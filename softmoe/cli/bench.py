"""`softmoe bench layer|model|routers`: timings with their share of the roofline."""

from pathlib import Path
from typing import Annotated, Literal

import tyro


def run(
    what: Annotated[Literal["layer", "model", "routers"], tyro.conf.Positional],
    forward_only: bool = False,
    seconds: float = 15.0,
    json: Path | None = None,
) -> None:
    """Time the layer (against peers), whole models, or the routers.

    Args:
        what: layer, model or routers.
        forward_only: Leave out the train steps.
        seconds: Time for each group of functions that are compared with each other.
        json: Also write the rows here.
    """
    from softmoe.bench.cases import Row, bench_layer, bench_model, bench_routers
    from softmoe.bench.peers import available_peers
    from softmoe.bench.report import save, table
    from softmoe.bench.roofline import describe, measure_roofline

    roofline = measure_roofline()
    print(describe(roofline), flush=True)
    if what == "layer":
        print(*available_peers()[1], sep="\n", flush=True)
        found = bench_layer(roofline, train=not forward_only, seconds=seconds)
    elif what == "model":
        found = bench_model(roofline, train=not forward_only, seconds=seconds)
    else:
        found = bench_routers(roofline, seconds=seconds)
    rows: list[Row] = []
    for line in table(rows.append(row) or row for row in found):
        print(line, flush=True)
    if json is not None:
        save(rows, roofline, json)


def main(argv: list[str]) -> int:
    tyro.cli(run, prog="softmoe bench", args=argv)
    return 0
