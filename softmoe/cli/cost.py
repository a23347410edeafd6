"""`softmoe cost`, `plan`, `bench` and `selftest`: what models and layouts need, by formula and by the clock."""

import json
import math
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Literal

from softmoe.cli.habits import parse_size
from softmoe.cli.parse import parse
from softmoe.evaluate.api import OnDevice, OthersWeights
from softmoe.machine import Precision
from softmoe.paths import check_new, unused_path


@dataclass(frozen=True)
class CostArguments(OthersWeights):
    """Parameters, multiply-accumulates and FLOPs per image, in total and by part."""

    models: tuple[str, ...] = ()
    """Models, like vit_s16, soft_s16_128e or experts_choice_b16_32e; or saved models, runs and others' weights."""
    _: KW_ONLY
    classes: int = 1000
    """Outputs of the head; 0 is a model without a head. A saved model has its own."""
    image_size: str = "224"
    """Pixels, or HEIGHTxWIDTH. A saved model has its own."""
    convention: Literal["ours", "paper"] = "ours"
    """Sparse routers: our dispatch by index, or the one-hot products that the paper's tables count."""
    json: bool = False
    """Print exact numbers as JSON."""
    paper: bool = False
    """Print the cost columns of the paper's tables beside ours, and where they differ."""


def cost_command(argv: list[str]) -> int:
    arguments = parse(CostArguments, argv, "cost")
    if not arguments.models and not arguments.paper:
        raise ValueError("give the names of models (like soft_s16_128e), or --paper")
    if arguments.paper and arguments != CostArguments(paper=True, json=arguments.json):
        raise ValueError("--paper shows the paper's own models and takes no name and no option but --json")
    image_size = parse_size(arguments.image_size)  # a typo shall not wait for torch

    from softmoe.budget import report
    from softmoe.budget.count import cost
    from softmoe.convert.foreign import open_foreign, with_options
    from softmoe.models import model_config
    from softmoe.storage import open_saved

    if arguments.paper:
        print(json.dumps(report.paper_values(), indent=2) if arguments.json else report.paper_report())
        return 0
    classes = arguments.classes or None
    configs = {
        name: (open_foreign(with_options(name, arguments.foreign_options)) or open_saved(name)).architecture
        if name == "demo" or Path(name).exists() or "/" in name or "?" in name
        else model_config(name, num_classes=classes, image_size=image_size)
        for name in arguments.models
    }
    if arguments.json:
        values = {name: cost(c, convention=arguments.convention).to_dict() for name, c in configs.items()}
        print(json.dumps(values, indent=2))
    else:
        print(report.models_report(configs, arguments.convention))
    return 0


@dataclass(frozen=True)
class PlanArguments:
    """Find the layouts of a model that fit on so many devices, and the fastest of them."""

    model: str
    """A model, like soft_s16_128e or soft_h14_256e."""
    _: KW_ONLY
    devices: int = 8
    memory: str | None = None
    """Memory of one device, like 40GB; None is that of the device."""
    batch: int = 4096
    """Images per step, all devices together."""
    device: Literal["a100-40", "a100-80", "h100"] = "a100-40"
    interconnect: float | None = None
    """GB/s of one device to other nodes; None is that of the device."""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    optimizer: Literal["adamw", "sgd"] = "adamw"
    classes: int = 1000
    image_size: int = 224
    json: bool = False
    """Print exact numbers as JSON."""


def plan_command(argv: list[str]) -> int:
    arguments = parse(PlanArguments, argv, "plan")
    size = None if arguments.memory is None else parse_bytes(arguments.memory)  # a typo shall not wait for torch

    from softmoe.budget.plan import DEVICES, Settings, most_experts, plans
    from softmoe.budget.report import plan_report, plan_values
    from softmoe.models import model_config

    hardware = DEVICES[arguments.device]
    hardware = replace(hardware, memory=size or hardware.memory)
    if arguments.interconnect is not None:
        hardware = replace(hardware, between=arguments.interconnect * 1e9)
    config = model_config(arguments.model, num_classes=arguments.classes or None, image_size=arguments.image_size)
    item = 2 if arguments.precision == "bfloat16" else 4
    settings = Settings(arguments.batch, activation_bytes=item, optimizer=arguments.optimizer)
    candidates = plans(config, arguments.devices, settings)
    most = most_experts(config, arguments.devices, settings, hardware)
    if arguments.json:
        print(json.dumps(plan_values(candidates, hardware, most), indent=2))
    else:
        print(plan_report(arguments.model, candidates, hardware, most))
    return 0


def parse_bytes(text: str) -> float:
    """Return the bytes that a text such as 40GB, 40 GiB or 512MB means."""
    units = {"GB": 1e9, "GIB": 2**30, "MB": 1e6, "MIB": 2**20, "TB": 1e12}
    digits = text.rstrip("GMTIBgmtib ")
    unit = text[len(digits) :].strip().upper()
    try:
        value = float(digits) * units[unit]
    except (ValueError, KeyError):
        raise ValueError(f"--memory must be a size like 40GB or 80GiB, got {text!r}") from None
    if value <= 0:
        raise ValueError(f"--memory must be above 0, got {text!r}")
    return value


@dataclass(frozen=True)
class BenchArguments(OnDevice):
    """Time functions in turn on this machine: medians, their spread, and the share of the roofline."""

    what: Literal["layer", "model", "train", "infer", "routers", "data", "peers", "scaling"]
    """layer (against an MLP and peers), model (against its dense backbone), train (the loop against the bare step),
    infer (prepared models), routers (and what moving rows costs), data (an image on one core), peers (models with
    peers' layers, each in its own process: time and peak memory) or scaling (number of experts)."""
    _: KW_ONLY
    seconds: float = 15.0
    """Time for each group of functions that are compared with each other."""
    json: Path | None = None
    """Also write the rows to this new file."""
    compare: Path | None = None
    """Rows of another day, written by --json: say what moved beyond the noise."""
    plot: Path | None = None
    """Also draw them into this new file (PNG or SVG; needs matplotlib)."""
    device: str = "cpu"
    """cpu or cuda: layer, model, infer, routers and scaling can be timed on a GPU, with its own roofline and memory."""
    precision: Precision = "float32"
    """The precision of products on a GPU: auto, bfloat16, float32 (TF32), exact."""


def bench_command(argv: list[str]) -> int:
    a = parse(BenchArguments, argv, "bench")
    if not 0 < a.seconds < math.inf:
        raise ValueError(f"--seconds must be above 0, got {a.seconds:g}")
    check_new(a.json, "--json")
    check_new(a.plot, "--plot")

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
    """Check routers, kernels, training, resuming and speed on this machine, in about two minutes.

    The exit code is 0 if nothing is wrong, 1 if something is.
    """

    _: KW_ONLY
    device: str = "auto"
    """auto, cpu, cuda, cuda:1."""
    quick: bool = False
    """Seconds instead of minutes: smaller runs, no torch.compile."""
    out: Path | None = None
    """The page to write, selftest.md if not given, with a number if there is one; it names nothing of the user."""


def selftest_command(argv: list[str]) -> int:
    a = parse(SelftestArguments, argv, "selftest")
    check_new(a.out, "--out")

    from softmoe.bench.report import facts, page
    from softmoe.bench.selftest import selftest
    from softmoe.machine import choose_device
    from softmoe.storage.files import write_text

    device = choose_device(a.device)
    checks = []
    for check in selftest(device, quick=a.quick):
        checks.append(check)
        print(f"{check.state:<10} {check.name}: {check.said}", flush=True)
    out = a.out or unused_path(Path("selftest.md"))
    write_text(out, page(checks, facts(device), device, quick=a.quick))
    print(f"wrote {out}")
    return 1 if any(check.state == "WRONG" for check in checks) else 0
