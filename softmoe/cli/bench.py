"""`softmoe bench` and `softmoe selftest`: how fast this machine is, and whether it computes right."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Literal

from softmoe.cli.parse import parse


@dataclass(frozen=True)
class BenchArguments:
    """Time functions in turn on this machine: medians, their spread, and the share of the roofline."""

    what: Literal["layer", "model", "train", "infer", "routers", "data", "peers", "scaling"]
    """layer (against an MLP and peers), model (against its dense backbone), train (the loop against the bare step),
    infer (prepared models), routers (and what moving rows costs), data (an image on one core), peers (models with
    peers' layers, each in its own process: time and peak memory) or scaling (number of experts)."""
    _: KW_ONLY
    seconds: float = 15.0
    """Time for each group of functions that are compared with each other."""
    json: Path | None = None
    """Also write the rows here."""
    compare: Path | None = None
    """Rows of another day, written by --json: say what moved beyond the noise."""
    plot: Path | None = None
    """Also draw them here (PNG or SVG; needs matplotlib)."""
    device: str = "cpu"
    """cpu or cuda: layer, model, infer, routers and scaling can be timed on a GPU, with its own roofline and memory."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """What products are computed in on cuda."""


def bench_command(argv: list[str]) -> int:
    a = parse(BenchArguments, argv, "bench")

    from softmoe.bench import timed_on

    with timed_on(a.device, a.what, a.precision):
        run_suite(a)
    return 0


def run_suite(a: BenchArguments) -> None:
    from softmoe.bench import suite
    from softmoe.bench.loop import cores_needed
    from softmoe.bench.peers import available_peers
    from softmoe.bench.report import as_text, differences, draw, load, save
    from softmoe.bench.timing import Probes, machine, machine_line, measure_roofline

    old = None if a.compare is None else load(a.compare)
    roofline = measure_roofline()
    print(machine_line(roofline), flush=True)
    if a.what in ("layer", "peers"):
        print(*available_peers()[1], sep="\n", flush=True)
    rows = []
    for line in as_text(rows.append(row) or row for row in suite(a.what)(Probes(), seconds=a.seconds)):
        print(line, flush=True)
    if a.what == "data":
        print(*cores_needed(rows), sep="\n", flush=True)
    if a.json is not None:
        save(rows, roofline, a.json)
    if a.plot is not None:
        draw(rows, machine_line(roofline), a.plot)
    if old is not None:
        now = machine()
        for key in ("cpu", "cores", "threads", "torch", "gpu", "products"):
            if old[0].get(key) != now.get(key):
                print(f"another {key} then: {old[0].get(key)}, now {now.get(key)}")
        print(*differences(old[1], rows), sep="\n")


@dataclass(frozen=True)
class SelftestArguments:
    """Check routers, kernels, training, resuming and speed on this machine, about two minutes. Exit code 0 if nothing
    is wrong, 1 if something is."""

    _: KW_ONLY
    device: str = "auto"
    """auto, cpu, cuda, cuda:1."""
    quick: bool = False
    """Seconds instead of minutes: smaller runs, no torch.compile."""
    output: Path = Path("selftest.md")
    """The page to write; it names the machine and nothing of its user."""


def selftest_command(argv: list[str]) -> int:
    a = parse(SelftestArguments, argv, "selftest")

    from softmoe.bench.report import facts, page
    from softmoe.bench.selftest import selftest
    from softmoe.machine import choose_device
    from softmoe.storage.files import write_text

    device = choose_device(a.device)
    checks = []
    for check in selftest(device, quick=a.quick):
        checks.append(check)
        print(f"{check.state:<10} {check.name}: {check.said}", flush=True)
    write_text(a.output, page(checks, facts(device), device, quick=a.quick))
    print(f"wrote {a.output}")
    return 1 if any(check.state == "WRONG" for check in checks) else 0
