"""What must be settled before torch loads, and what this machine can do.

Nothing here overrides a variable the user set.
"""

import getpass
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Precision = Literal["auto", "bfloat16", "float32", "exact"]
"""What --precision takes; `choose_precision` says what each means."""
CPUINFO = Path("/proc/cpuinfo")


def prepare_environment() -> None:
    """Set the thread, CPU and memory guards. Called when softmoe is imported, before torch is.

    - libgomp's threads spin at barriers; on shared cores that makes a model up to 20 times slower. PASSIVE sleeps at
      once, and waking up is felt in small models: 200 looks before falling asleep avoid most of it.
    - Some virtual machines hide a CPUID leaf that oneDNN needs for AMX, and bfloat16 products then die with an
      illegal instruction. A cap on the instruction set avoids that; float16 keeps its speed.
    - Stacked expert gradients are hundreds of megabytes, allocated anew at every step. In huge pages that costs
      little; in 4 KiB pages it took longer than computing them.
    """
    if os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE").upper() == "PASSIVE":
        os.environ.setdefault("GOMP_SPINCOUNT", "200")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    cap = safe_instruction_set()
    if cap and not {"ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"} & os.environ.keys():
        os.environ["ONEDNN_MAX_CPU_ISA"] = cap


def use_threads(count: int | None) -> None:
    """Compute with so many processor threads; None leaves it to torch."""
    if count is None:
        return
    if count < 1:
        raise ValueError(f"threads must be at least 1, got {count}")
    os.environ["OMP_NUM_THREADS"] = str(count)  # for a torch that is not loaded yet
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(count)


def end_with_parent() -> None:
    """Have this process asked to end (SIGTERM) when the one that started it with `multiprocessing` is gone.

    A parent that is killed cannot tell its children, which would go on computing for nobody.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="end with parent", daemon=True).start()


def safe_instruction_set(cpuinfo: Path = CPUINFO) -> str | None:
    """The cap oneDNN needs on this CPU, or None where AMX works or is absent."""
    fields = first_core(cpuinfo)
    flags = fields.get("flags", "").split()
    if "amx_tile" not in flags or int(fields.get("cpuid level") or 99) >= 0x1D:
        return None
    return "AVX512_CORE_FP16" if "avx512_fp16" in flags else "AVX512_CORE_BF16"


def is_amd_avx512(cpuinfo: Path = CPUINFO) -> bool:
    """True on AMD processors with AVX-512. MKL keeps its float32 products of that width for other processors."""
    fields = first_core(cpuinfo)
    return fields.get("vendor_id") == "AuthenticAMD" and "avx512f" in fields.get("flags", "").split()


def first_core(cpuinfo: Path = CPUINFO) -> dict[str, str]:
    """What Linux says of it."""
    try:
        with cpuinfo.open() as file:
            lines = file.read(65536).split("\n\n", 1)[0].splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def cache_folder() -> Path:
    """Where things that can be made again are kept: $SOFTMOE_CACHE, or ~/.cache/softmoe; a user without a home has a
    folder of their own among the temporary ones."""
    if wanted := os.environ.get("SOFTMOE_CACHE"):
        return Path(wanted)
    try:
        return Path.home() / ".cache" / "softmoe"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"softmoe-{os.getuid() if hasattr(os, 'getuid') else getpass.getuser()}"


@cache
def bfloat16_works() -> bool:
    """Try a bfloat16 product in a child process: the crash it may cause must not be ours."""
    import multiprocessing

    if sys.platform == "win32":
        return True  # no fork; the broken virtual machines are Linux ones
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


def choose_device(name: str, place: int | None = None) -> "torch.device":
    """The device that `name` (auto, cpu, cuda, cuda:1, mps) means here. ValueError where it cannot be used.

    `place` counts the processes of one machine, if there are several: each takes an accelerator of its own.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and place is not None:
        name = f"cuda:{place}"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"the device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device


def make_deterministic() -> None:
    """Let torch take algorithms that give the same bits every time on the same GPU. An operation that has none warns.

    To be called before CUDA is first used: its matrix library reads the variable when it starts.
    """
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False


def choose_precision(
    wanted: Precision, device: "torch.device", report: Callable[[str], None] | None = None
) -> "torch.dtype | None":
    """The dtype that products are computed in under autocast, or None for float32; weights stay float32.

    auto       bfloat16 on a CUDA device that has it, float32 elsewhere
    bfloat16   where it was seen to work; else float32, and `report` is told
    float32    on CUDA with TF32 products: inputs of 10 bits, sums in float32
    exact      float32 products of all 24 bits, many times slower on CUDA
    """
    import torch

    cuda = device.type == "cuda"
    if cuda:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = wanted != "exact"
    if wanted in ("float32", "exact") or (wanted == "auto" and not cuda):
        return None
    if torch.cuda.is_bf16_supported(including_emulation=False) if cuda else device.type == "cpu" and bfloat16_works():
        return torch.bfloat16
    if report is not None and wanted == "bfloat16":
        report("precision: this machine has no working bfloat16, going on in float32")
    return None
