"""`softmoe bench layer|model|train|infer|routers|data|peers|scaling`: timings, with their share of the roofline."""

from pathlib import Path
from typing import Annotated, Literal

import tyro

What = Literal["layer", "model", "train", "infer", "routers", "data", "peers", "scaling"]


def run(
    what: Annotated[What, tyro.conf.Positional],
    seconds: float = 15.0,
    json: Path | None = None,
    compare: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Time functions in turn on this machine: medians, their spread, and the share of the roofline.

    Args:
        what: layer (against an MLP and peers), model (against its dense backbone), train (the loop against the bare
            step), infer (prepared models), routers (and what moving rows costs), data (an image on one core), peers
            (models with peers' layers, each in its own process: time and peak memory) or scaling (number of experts).
        seconds: Time for each group of functions that are compared with each other.
        json: Also write the rows here.
        compare: Rows of another day, written by --json: say what moved beyond the noise.
        plot: Also draw them here (PNG or SVG; needs matplotlib).
    """
    from softmoe.bench import suite
    from softmoe.bench.peers import available_peers
    from softmoe.bench.report import as_text, differences, draw, load, save
    from softmoe.bench.roofline import Probes, machine, machine_line, measure_roofline

    old = None if compare is None else load(compare)
    roofline = measure_roofline()
    print(machine_line(roofline), flush=True)
    if what in ("layer", "peers"):
        print(*available_peers()[1], sep="\n", flush=True)
    rows = []
    for line in as_text(rows.append(row) or row for row in suite(what)(Probes(), seconds=seconds)):
        print(line, flush=True)
    if json is not None:
        save(rows, roofline, json)
    if plot is not None:
        draw(rows, machine_line(roofline), plot)
    if old is not None:
        now = machine()
        for key in ("cpu", "cores", "threads", "torch"):
            if old[0].get(key) != now[key]:
                print(f"another {key} then: {old[0].get(key)}, now {now[key]}")
        print(*differences(old[1], rows), sep="\n")


def main(argv: list[str]) -> int:
    tyro.cli(run, prog="softmoe bench", args=argv)
    return 0
