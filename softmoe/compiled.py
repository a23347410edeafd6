"""C++ of our own, built once with the machine's compiler and kept in the cache folder.

No compiler, or one that fails, is no error: there is a sentence instead of a library, and whoever asked computes the
same with torch, more slowly. `SOFTMOE_KERNEL=off` asks for that.
"""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from softmoe.machine import cache_folder

_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-fno-math-errno", "-Wno-psabi")
_NATIVE = ("-march=native",)
_INCLUDE = re.compile(r'^#include "(.+)"', re.MULTILINE)
LANES = 16
"""Numbers in the widest vector that the compiled loops use."""
LARGE = 1 << 22
"""Bytes; where less is passed over, calling takes the time."""


class CannotBuild(Exception):
    """Why there is no library here, in one sentence."""


def library_of(source: Path, right: Callable[[ctypes.CDLL], bool], flags: tuple[str, ...] = ()) -> ctypes.CDLL | str:
    """The library, if it can be had and `right` finds its results to be so; else why not, in one sentence."""
    if os.environ.get("SOFTMOE_KERNEL", "on").lower() in ("off", "0", "no"):
        return "it was turned off by SOFTMOE_KERNEL"
    try:
        found = ctypes.CDLL(str(build(source, (*_NATIVE, *flags))))
    except (CannotBuild, OSError) as error:
        return str(error)
    return found if right(found) else f"the compiled {source.stem} gives wrong results on this machine"


def loaded(found: ctypes.CDLL | str) -> ctypes.CDLL:
    """The library, for whoever knows that there is one."""
    assert isinstance(found, ctypes.CDLL), found
    return found


def build(source: Path, native: tuple[str, ...] = _NATIVE) -> Path:
    """The shared library, compiled if it is not in the cache. Its name holds all that decides what is inside."""
    compiler = next((c for c in (os.environ.get("CXX"), "g++", "clang++", "c++") if c and shutil.which(c)), None)
    if compiler is None:
        raise CannotBuild("no C++ compiler was found (g++ or clang++)")
    said = "\0".join([*_texts(source), compiler, *_FLAGS, *native, platform.machine(), processor()])
    key = hashlib.blake2b(said.encode(), digest_size=12).hexdigest()
    target = cache_folder() / "kernels" / f"{source.stem}-{key}.so"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, partial = tempfile.mkstemp(dir=target.parent, prefix=f".{source.stem}-", suffix=".so")
    except OSError as error:
        raise CannotBuild(f"the compiled {source.stem} cannot be kept in {target.parent}: {error.strerror}") from error
    os.close(handle)
    try:
        command = [compiler, *_FLAGS, *native, str(source), "-o", partial]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or ["it said nothing"]
            raise CannotBuild(f"{compiler} failed: {lines[0].strip()}")
        os.replace(partial, target)  # several processes may build at once: each file is whole
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuild(f"{compiler} could not be run: {error}") from error
    finally:
        Path(partial).unlink(missing_ok=True)
    return target


def _texts(source: Path) -> list[str]:
    """Of a file, and of those beside it that it includes."""
    text = source.read_text()
    return [text, *(t for name in _INCLUDE.findall(text) for t in _texts(source.parent / name))]


def processor() -> str:
    """What -march=native looks at; a cache folder may be shared by different machines."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    kept = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in text.splitlines() if line.startswith(kept)}))


def address(of: Tensor | np.ndarray) -> ctypes.c_void_p:
    """Of what must live as long as the call."""
    return ctypes.c_void_p(of.data_ptr() if isinstance(of, Tensor) else of.ctypes.data)


def threads() -> ctypes.c_int:
    return ctypes.c_int(torch.get_num_threads())


def worth_it(x: Tensor, *others: Tensor, times: int = 1) -> bool:
    """Whether a compiled pass over `times` as much as x may stand for torch's: in a training step, on more numbers than
    a cache holds, and all plain float32 tensors on a CPU, each in one piece."""
    return (
        _unseen()
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and x.requires_grad
        and times * x.nbytes > LARGE
        and plain(x, *others)
        and all(t.is_contiguous() and forward_ad.unpack_dual(t).tangent is None for t in (x, *others))
    )


def plain(*tensors: Tensor) -> bool:
    """Whether all are float32 on a CPU, and of no class that would want to be asked."""
    kinds = (Tensor, nn.Parameter)
    return all(type(t) in kinds and t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors)


def worth_it_backward(*gradients: Tensor) -> bool:
    """Whether it may stand for torch's in the backward pass of what it computed: nobody derives that pass."""
    batched = torch._C._functorch.is_legacy_batchedtensor  # pyright: ignore[reportAttributeAccessIssue]
    return not torch.is_grad_enabled() and _unseen() and not any(batched(g) for g in gradients)


def _unseen() -> bool:
    """Nobody compiles, traces, transforms or counts what is computed now: they do not see into compiled code."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
        or torch._C._are_functorch_transforms_active()
    )
