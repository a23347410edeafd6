"""A few minutes that show whether softmoe is right on this machine, as one page to read or to attach to an issue.

Every check computes something here and compares it with float64 on the CPU, or with itself; what is not there to be
tested (a second device, triton, a compiler) is said and counts as neither right nor wrong.
"""

import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from softmoe import accelerate
from softmoe.accelerate import fastest
from softmoe.accelerate.guards import Off
from softmoe.bench import timed_on
from softmoe.bench.cases import Contender, train_step
from softmoe.bench.report import Check, lines_of, without_user
from softmoe.bench.timing import Work, allocated_by, interleave, measure_roofline, on_cuda
from softmoe.budget import cost
from softmoe.convert import from_pretrained
from softmoe.data import TransformConfig
from softmoe.machine import Precision, choose_precision
from softmoe.models import create_model
from softmoe.moe import Experts, MoE
from softmoe.moe.config import ROUTERS
from softmoe.train import (
    CheckpointSection,
    DataSection,
    EvaluationSection,
    LogSection,
    ModelSection,
    ScheduleSection,
    TrainConfig,
    train,
)
from softmoe.train.log import read_metrics
from softmoe.train.objectives import make_objective

PATIENCE = 300  # seconds for a run of several processes


class CheckFailed(Exception):
    """A check failed; the text says what was found and what was expected."""


class Unsupported(Exception):
    """This machine lacks what the check needs; the text says what."""


@dataclass(frozen=True)
class Setup:
    """The device on which the checks run, how long they may take, and a folder for runs."""

    device: torch.device
    quick: bool
    folder: Path

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"


def selftest(device: torch.device, *, quick: bool = False) -> Iterator[Check]:
    """Run all checks, one after the other; an error in one is its result. `quick` takes seconds instead of minutes."""
    with tempfile.TemporaryDirectory(prefix="softmoe-selftest-") as folder:
        setup = Setup(device, quick, Path(folder))
        for name, check in CHECKS.items():
            begun = time.perf_counter()
            try:
                with redirect_stderr(StringIO()):  # what runs tell of themselves
                    state, said = "ok", check(setup)
            except Unsupported as error:
                state, said = "not tested", str(error)
            except torch.OutOfMemoryError:
                state, said = "not tested", "the device has not enough free memory for this check"
            except CheckFailed as error:
                state, said = "WRONG", str(error)
            except Exception as error:  # whatever goes wrong is what the page is for
                state, said = "WRONG", f"{type(error).__name__}: {error} ({lines_of(error)})"
            what = (check.__doc__ or "").split("\n")[0]
            yield Check(name, state, without_user(" ".join(said.split())), time.perf_counter() - begun, what)


def routers(setup: Setup) -> str:
    """Every router in float32 on the device against float64 on the CPU, outputs and gradients."""
    choose_precision("exact", setup.device)
    errors = {name: _router_error(name, setup.device) for name in ROUTERS}
    worst = max(errors, key=errors.__getitem__)
    return _at_most(errors[worst], 1e-3, f"{len(errors)} routers, the worst is {worst}")


def _router_error(name: str, device: torch.device) -> float:
    torch.manual_seed(0)
    options = {"num_experts": 16} if name == "identity" else {"num_experts": 4}
    layer = MoE(ROUTERS[name](**options).build(24), Experts(24, 32, options["num_experts"])).eval()
    x = torch.randn(3, 16, 24)
    right = _outputs(layer.double(), x.double())
    found = _outputs(layer.float().to(device), x.to(device))
    return max(fastest.distance(a, b) for a, b in zip(found, right, strict=True))


def _outputs(layer: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = layer(x)
    gradients = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()], allow_unused=True)
    return [t.detach().cpu().double() for t in (y, *gradients) if t is not None]


def kernels(setup: Setup) -> str:
    """The Triton kernels on the device against float64 on the CPU: exact, in TF32 and in bfloat16."""
    try:
        fastest.need_triton(nn.Linear(1, 1).to(setup.device))
    except Off as error:
        raise Unsupported(str(error)) from error
    if old := fastest.too_old(setup.device):
        raise Unsupported(old.why)
    said = []
    limits: dict[Precision, float] = {"exact": 1e-4, "float32": 5e-3, "bfloat16": 3e-2}
    for precision, limit in limits.items():
        found = fastest.kernel_errors(setup.device, choose_precision(precision, setup.device) or torch.float32)
        said += [_at_most(error, max(limit, 1e-2 * (name == "AdamW")), f"{name}, {precision}") for name, error in found]
    return "; ".join(said)


def accelerations(setup: Setup) -> str:
    """A model with all accelerations that this machine has, against the plain one in float64."""
    torch.manual_seed(0)
    model = create_model("soft_ti16_4e", image_size=32, num_classes=10, depth=2)
    nn.init.normal_(model.head.weight, std=0.1)  # pyright: ignore[reportArgumentType]  # zero at first
    images = torch.randn(8, 3, 32, 32)
    right = _outputs(model.double(), images.double())
    model = model.float().to(setup.device)
    report = accelerate.apply(model)
    error = max(fastest.distance(a, b) for a, b in zip(_outputs(model, images.to(setup.device)), right, strict=True))
    return _at_most(error, 2e-2 if setup.cuda else 1e-3, str(report))


def steps(setup: Setup) -> str:
    """A run on one batch, again and again: the loss falls, and memory stays from the second quarter on."""
    return _falls(setup, 16 if setup.quick else 100, "float32")


def bfloat16(setup: Setup) -> str:
    """A run on one batch, again and again, with products in bfloat16."""
    if choose_precision("bfloat16", setup.device) is None:
        raise Unsupported("no working bfloat16 on this device")
    return _falls(setup, 16 if setup.quick else 100, "bfloat16")


def waits(setup: Setup) -> str:
    """Steps in which the host must not wait for the device: torch warns of every call that does."""
    if not setup.cuda:
        raise Unsupported("a processor is not waited for")
    config = _config(setup, "waits", 12, precision="auto")
    real, calls = make_objective(config.objective), []

    def objective(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        calls.append(batch)  # first kernels are timed, and the last step is saved
        torch.cuda.set_sync_debug_mode("warn" if 4 < len(calls) < config.steps else "default")
        return real(model, batch)

    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(config, objective=objective)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = Counter(f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message))
    if found:
        raise CheckFailed("the host waits at " + ", ".join(f"{line} ({n} times)" for line, n in found.items()))
    return f"none in {config.steps - 5} steps"


def compiled(setup: Setup) -> str:
    """A few steps under torch.compile."""
    if setup.quick:
        raise Unsupported("torch.compile takes too long for the quick form")
    return _falls(setup, 20, "float32", compile=True)


def _falls(setup: Setup, count: int, precision: Any, **changes: Any) -> str:
    losses: list[float] = []
    memory: list[int] = []
    first_batch: list[Any] = []
    config = _config(setup, f"run-{precision}-{len(changes)}", count, precision=precision, **changes)
    real = make_objective(config.objective)

    def objective(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        if not first_batch:
            first_batch.append(batch)
        loss, numbers = real(model, first_batch[0])
        losses.append(loss.item())
        memory.append(_memory(setup))
        return loss, numbers

    train(config, objective=objective)
    quarter = count // 4
    first, last = sum(losses[:quarter]) / quarter, sum(losses[-quarter:]) / quarter
    said = f"{count} steps, loss {first:.2f} to {last:.2f}"
    if not last < 0.95 * first:
        raise CheckFailed(f"{said}: it does not fall")
    early, late = max(memory[quarter : 2 * quarter]), max(memory[2 * quarter :])
    grown = f"memory {early / 1e6:.0f} to {late / 1e6:.0f} MB"
    if late > 1.02 * early + 8e6:
        raise CheckFailed(f"{said}, but {grown}: it grows")
    return f"{said}, {grown}"


def resume(setup: Setup) -> str:
    """A run that is broken off and taken up again ends as one that was not, with deterministic algorithms."""
    whole, broken = (_config(setup, name, 6, deterministic=True) for name in ("whole", "broken"))
    real, calls = make_objective(broken.objective), []

    def objective(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        calls.append(batch)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return real(model, batch)

    try:
        train(whole)
        with suppress(KeyboardInterrupt):
            train(broken, objective=objective)
        train(broken)
    finally:
        torch.use_deterministic_algorithms(False)
    ends = [from_pretrained(setup.folder / name).state_dict().values() for name in ("whole", "broken")]
    if all(torch.equal(a, b) for a, b in zip(*ends, strict=True)):
        return "the same bits as without the break"
    error = max(fastest.distance(a.double(), b.double()) for a, b in zip(*ends, strict=True))
    return _at_most(error, 1e-3, "not the same bits")


def devices(setup: Setup) -> str:
    """Compare steps on all CUDA devices (as copies, as shards, with owned experts) with the same steps on one."""
    count = torch.cuda.device_count() if setup.cuda else 1
    if count < 2:
        raise Unsupported("one device is here, so nothing was spread over several")
    return spread(setup, count)


def spread(setup: Setup, count: int) -> str:
    """Compare the loss of `count` processes with that of one."""
    one = _loss_of(setup, "one", 1, count)
    ways = {"copies": [], "shards": ["--parallel.shard", str(count)]}
    if 16 % count == 0:
        ways["owned experts"] = ["--parallel.expert", str(count)]
    losses = {way: _loss_of(setup, way, count, count, *more) for way, more in ways.items()}
    said = [_at_most(abs(loss - one) / one, 1e-2, way) for way, loss in losses.items()]
    return f"4 steps on {count} devices, whose loss is {one:.3f} on one; {'; '.join(said)}"


def _loss_of(setup: Setup, name: str, processes: int, largest: int, *more: str) -> float:
    """Train a small model with 16 experts; the loss of its last steps. All have the same batches, whoever computes."""
    run = name.replace(" ", "-")
    options = {"steps": 4, "runs": setup.folder, "run-name": run, "precision": "float32", "device": setup.device.type}
    options |= {"data.train": "shapes?size=32", "data.batch-size": 8 * largest}
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += ["-m", "softmoe", "train", "quickstart", *words, *more]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired as error:
        raise CheckFailed(f"{name}, {processes} processes: not done after {PATIENCE} s") from error
    if done.returncode:
        raise CheckFailed(f"{name}, {processes} processes: " + " / ".join(done.stderr.strip().splitlines()[-3:]))
    lines = read_metrics(setup.folder / run / "metrics.jsonl")
    return [line["loss"] for line in lines if "loss" in line][-1]


def throughput(setup: Setup) -> str:
    """A train step of a real model, as images a second and as a share of what the device can do."""
    name, batch = ("soft_s16_16e", 64) if setup.cuda else ("soft_ti16_4e", 2)
    size = 224 if not setup.quick else 64
    precision = "bfloat16" if choose_precision("auto", setup.device) else "float32"
    with timed_on(str(setup.device), "model", precision):
        model, images = create_model(name, image_size=size), torch.randn(batch, 3, size, size)
        step = train_step(Contender(model, images, None, accelerated=True))
        timing = interleave({"step": step}, rounds=5 if setup.quick else 15, seconds=20)["step"]
        roofline, price = measure_roofline(rounds=3), cost(model)
        least = roofline.seconds(*Work(batch * price.macs, price.params, images.numel()).train())
        memory = f", {allocated_by(step) / 1e9:.2f} GB beside weights and moments" if on_cuda() else ""
    return (
        f"{name}, {size} pixels, batch {batch}, {precision}: {batch / timing.median:.1f} images/s, "
        f"{least / timing.median:.0%} of the roofline ({roofline.flops_per_second / 1e12:.2f} TFLOP/s, "
        f"{roofline.bytes_per_second / 1e9:.0f} GB/s, both measured){memory}"
    )


CHECKS: dict[str, Callable[[Setup], str]] = {
    "routers": routers,
    "Triton kernels": kernels,
    "accelerations": accelerations,
    "training": steps,
    "bfloat16": bfloat16,
    "waits": waits,
    "torch.compile": compiled,
    "resuming": resume,
    "several devices": devices,
    "throughput": throughput,
}


def _config(setup: Setup, name: str, count: int, **changes: Any) -> TrainConfig:
    config = TrainConfig(
        run_name=name,
        runs=str(setup.folder),
        steps=count,
        model=ModelSection(name="soft_ti4_4e", width=32, depth=2, heads=2, mlp_dim=64, blocks=(1,)),
        data=DataSection(
            train="shapes?size=16",
            batch_size=32,
            workers=0,
            transform=TransformConfig(image_size=16, crop="resize", flip=True),
        ),
        schedule=ScheduleSection(kind="cosine", peak=1e-2, warmup=2),
        evaluation=EvaluationSection(every=count, examples=32),
        checkpoint=CheckpointSection(every=3 if count < 10 else count),
        log=LogSection(every=count, quiet=True),
        device=str(setup.device),
    )
    return replace(config, **changes)


def _memory(setup: Setup) -> int:
    """Bytes taken from the CUDA allocator, or those of this process; 0 where nobody says."""
    if setup.cuda:
        return torch.cuda.memory_allocated(setup.device)
    try:
        return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _at_most(error: float, limit: float, what: str) -> str:
    if not error <= limit:
        raise CheckFailed(f"{what}: off by {error:.1e}, more than {limit:.0e}")
    return f"{what}: off by {error:.1e} (right up to {limit:.0e})"
