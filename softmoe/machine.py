"""Settings of the process that must be made before torch loads, and what this machine can do.

Nothing here overrides a variable that the user set.
"""

import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor

Precision = Literal["auto", "bfloat16", "float32", "exact"]
"""The values of --precision; `choose_precision` says what each means."""
CPUINFO = Path("/proc/cpuinfo")
MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
MOST_AT_ONCE = 4096  # threads, data workers, batches ahead: more are a slip of the keyboard


def prepare_environment() -> None:
    """Set environment variables for threads, instructions and memory. Called when softmoe is imported, before torch is.

    - The threads of libgomp spin at barriers, which makes a model up to 20 times slower on shared cores. PASSIVE puts
      them to sleep at once, which slows small models; spinning 200 times before avoids most of that.
    - Some virtual machines hide a CPUID leaf that oneDNN needs for AMX, and bfloat16 products then die with an
      illegal instruction. A cap on the instruction set avoids that; float16 keeps its speed.
    - The gradients of stacked experts are hundreds of megabytes, allocated at every step. In pages of 4 KiB that took
      longer than computing them; in huge pages it costs little.
    """
    if os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE").upper() == "PASSIVE":
        os.environ.setdefault("GOMP_SPINCOUNT", "200")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    cap = safe_instruction_set()
    if cap and not {"ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"} & os.environ.keys():
        os.environ["ONEDNN_MAX_CPU_ISA"] = cap


def is_first_process() -> bool:
    """Tell if this is the process of a run of many, as torchrun starts them, that speaks for all."""
    return os.environ.get("RANK", "0") == "0"


def use_threads(count: int | None) -> None:
    """Set the number of processor threads; None leaves it to torch."""
    if count is None:
        return
    if count < 1:
        raise ValueError(f"threads must be at least 1, got {count}")
    if count > MOST_AT_ONCE:
        raise ValueError(f"threads must be at most {MOST_AT_ONCE}, got {count}")
    os.environ["OMP_NUM_THREADS"] = str(count)  # for a torch that is not loaded yet
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(count)


def end_with_parent() -> None:
    """Send SIGTERM to this process when the parent that started it with `multiprocessing` is gone.

    A parent that is killed cannot stop its children itself.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="end with parent", daemon=True).start()


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Start processes that are deaf to Ctrl-C from their first moment: it would end in a traceback of their imports.

    They inherit that, until they allow it themselves. Windows knows no such thing.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def allow_interrupts() -> None:
    """Let Ctrl-C reach this process again, also one that came while it was blocked."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def safe_instruction_set(cpuinfo: Path = CPUINFO) -> str | None:
    """Return the instruction set to which oneDNN must be capped on this CPU; None where AMX works or is absent."""
    fields = first_core(cpuinfo)
    flags = fields.get("flags", "").split()
    if "amx_tile" not in flags or int(fields.get("cpuid level") or 99) >= 0x1D:
        return None
    return "AVX512_CORE_FP16" if "avx512_fp16" in flags else "AVX512_CORE_BF16"


def is_amd_avx512(cpuinfo: Path = CPUINFO) -> bool:
    """Tell if this is an AMD processor with AVX-512, which MKL's float32 products do not use there."""
    fields = first_core(cpuinfo)
    return fields.get("vendor_id") == "AuthenticAMD" and "avx512f" in fields.get("flags", "").split()


def first_core(cpuinfo: Path = CPUINFO) -> dict[str, str]:
    """Return the fields of the first core in /proc/cpuinfo; none on other systems."""
    try:
        with cpuinfo.open(encoding="utf-8") as file:
            lines = file.read(65536).split("\n\n", 1)[0].splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


@cache
def bfloat16_works() -> bool:
    """Try a bfloat16 product in a child process, since it may crash."""
    if sys.platform != "linux":
        return True  # the broken virtual machines are Linux ones, and others cannot fork beside torch's threads
    child = multiprocessing.get_context("fork").Process(target=_bfloat16_product)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking beside torch's threads: the child uses none
        child.start()
    child.join()
    return child.exitcode == 0


def _bfloat16_product() -> None:
    import torch

    torch.set_num_threads(1)
    x = torch.ones(64, 64, dtype=torch.bfloat16)
    (x @ x).sum().item()


def choose_device(name: str, local_rank: int | None = None) -> "torch.device":
    """Return the device that `name` (auto, cpu, cuda, cuda:1, mps) means here. ValueError if it cannot be used.

    `local_rank` is the number of this process on its machine, if there are several: each takes a GPU of its own. A GPU
    becomes the current one of this thread, for all calls that name none: kernels, events, timings.
    """
    import torch

    device = named_device(name)
    if device.type == "cuda" and device.index is None and local_rank is not None:
        device = torch.device("cuda", local_rank)
    try:
        torch.empty(1, device=device)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)
    except (RuntimeError, AssertionError) as error:
        why = "torch finds no Apple GPU" if device.type == "mps" else str(error).splitlines()[0]
        raise ValueError(f"the device {str(device)!r} cannot be used here: {why}") from error
    return device


def named_device(name: str) -> "torch.device":
    """Return the device of a name, which need not be here; auto is the first GPU or else the CPU."""
    import torch

    try:
        return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    except RuntimeError as error:
        known = "auto, cpu, cuda, cuda:1 and mps"
        raise ValueError(f"the device {name!r} cannot be used here: it is none of {known}") from error


def memory_of(name: str, limit: Path = MEMORY_LIMIT) -> int | None:
    """Return the bytes of memory of a device, of a CPU those of the machine or its container; None if not known."""
    import torch

    device = named_device(name)
    if device.type == "cuda":
        there = (device.index or 0) < torch.cuda.device_count()
        return torch.cuda.get_device_properties(device).total_memory if there else None
    if not hasattr(os, "sysconf"):
        return None
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    said = limit.read_text(encoding="utf-8").strip() if limit.is_file() else "max"
    return min(whole, int(said)) if said.isdigit() else whole


def event_on(device: "torch.device") -> "torch.cuda.Event":
    """Record and return an event that is reached when the CUDA device has done all work this thread gave it so far.

    An event without a stream would take that of the current device, which need not be this one: every thread starts
    with the first device as the current one.
    """
    import torch

    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def make_deterministic() -> None:
    """Make torch use deterministic algorithms on a GPU. An operation that has none warns.

    Call it before CUDA is first used: cuBLAS reads the variable when it starts.
    """
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False


def choose_precision(
    wanted: Precision, device: "torch.device", report: Callable[[str], None] | None = None
) -> "torch.dtype | None":
    """Return the dtype of products under autocast, or None for float32; weights stay float32.

    auto       bfloat16 on a CUDA device that has it, float32 elsewhere
    bfloat16   if it works here; else float32, and `report` gets a message
    float32    on CUDA with TF32 products: inputs of 10 bits, sums in float32
    exact      float32 products of all 24 bits, many times slower on CUDA
    """
    import torch

    cuda = device.type == "cuda"
    if cuda:
        allow_tf32(wanted != "exact")
    if wanted in ("float32", "exact") or (wanted == "auto" and not cuda):
        return None
    if torch.cuda.is_bf16_supported(including_emulation=False) if cuda else device.type == "cpu" and bfloat16_works():
        return torch.bfloat16
    if report is not None and wanted == "bfloat16":
        report("precision: this machine has no working bfloat16, going on in float32")
    return None


def allow_tf32(allowed: bool) -> None:
    """Let CUDA devices multiply float32 numbers in TF32, or not.

    Of torch's two switches this is the older one: it also sets the newer, whichever was used before. To set the newer
    alone is an error in torch 2.9 as soon as a compiler asks for the older; there the older one warns.
    """
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Please use the new API settings to control TF32")
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed


def is_spread(tensor: Any) -> TypeGuard["DTensor"]:
    """Tell if a tensor is a DTensor, without importing that class, which takes a second."""
    return hasattr(tensor, "to_local")


def local(tensor: "torch.Tensor") -> "torch.Tensor":
    """Return the part of a tensor that this rank keeps; the tensor itself if it is a plain one."""
    return tensor.to_local() if is_spread(tensor) else tensor
