"""The compiled product of product.cpp: built once with the machine's C++ compiler, kept in the cache folder.

No compiler, or one that fails, is no error: `available()` is False, `why_not()` says why, and everything falls back
to torch's products, which compute the same more slowly. `SOFTMOE_KERNEL=off` asks for that.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from softmoe.machine import cache_folder

PANEL = 64  # outputs that lie side by side in the packed weights, as in product.cpp
_SOURCE = Path(__file__).with_name("product.cpp")
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-Wno-psabi")
_NATIVE = ("-march=native",)
_NAMES = {
    torch.float32: "product_float32",
    torch.float16: "product_float16",
    torch.bfloat16: "product_bfloat16",
    torch.int8: "product_int8",
}


class CannotBuild(Exception):
    """Why there is no compiled product here, in one sentence."""


def available() -> bool:
    return isinstance(_library(), ctypes.CDLL)


def why_not() -> str | None:
    """One sentence, or None where the compiled product works."""
    found = _library()
    return None if isinstance(found, ctypes.CDLL) else found


@cache
def _library() -> ctypes.CDLL | str:
    if os.environ.get("SOFTMOE_KERNEL", "on").lower() in ("off", "0", "no"):
        return "it was turned off by SOFTMOE_KERNEL"
    try:
        library = ctypes.CDLL(str(build()))
    except (CannotBuild, OSError) as error:
        return str(error)
    return library if _right(library) else "the compiled product gives wrong results on this machine"


def build(native: tuple[str, ...] = _NATIVE) -> Path:
    """The shared library, compiled if it is not in the cache. Its name holds all that decides what is inside."""
    compiler = next((c for c in (os.environ.get("CXX"), "g++", "clang++", "c++") if c and shutil.which(c)), None)
    if compiler is None:
        raise CannotBuild("no C++ compiler was found (g++ or clang++)")
    said = "\0".join([_SOURCE.read_text(), compiler, *_FLAGS, *native, platform.machine(), _processor()])
    key = hashlib.blake2b(said.encode(), digest_size=12).hexdigest()
    target = cache_folder() / "kernels" / f"product-{key}.so"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, partial = tempfile.mkstemp(dir=target.parent, prefix=".product-", suffix=".so")
    except OSError as error:
        raise CannotBuild(f"the compiled product cannot be kept in {target.parent}: {error.strerror}") from error
    os.close(handle)
    try:
        command = [compiler, *_FLAGS, *native, str(_SOURCE), "-o", partial]
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


def _processor() -> str:
    """What -march=native looks at; a cache folder may be shared by different machines."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    kept = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in text.splitlines() if line.startswith(kept)}))


def _right(library: ctypes.CDLL) -> bool:
    """Small whole numbers are exact in every type: compare with torch before anyone relies on it."""
    x = torch.arange(3 * 7 * 5).remainder(9).view(3, 7, 5).float() - 4
    w = torch.arange(3 * 2 * 5 * PANEL).remainder(11).view(3, 2, 5, PANEL).float() - 5
    bias = torch.arange(3 * 70).remainder(3).view(3, 70).float()
    plain = x @ w.transpose(1, 2).reshape(3, 5, 2 * PANEL)[..., :70] + bias.unsqueeze(1)
    return all(torch.equal(call(library, x, w.to(dtype), None, bias), plain) for dtype in _NAMES)


def call(library: ctypes.CDLL, x_NSK: Tensor, packed_NQKE: Tensor, scale_NC: Tensor | None, bias_NC: Tensor) -> Tensor:
    N, S, K = x_NSK.shape
    C = bias_NC.shape[1]
    assert packed_NQKE.shape == (N, -(-C // PANEL), K, PANEL)
    assert x_NSK.dtype == bias_NC.dtype == torch.float32
    assert scale_NC is None or scale_NC.shape == bias_NC.shape
    assert all(t is None or t.is_contiguous() for t in (x_NSK, packed_NQKE, scale_NC, bias_NC))
    y_NSC = torch.empty(N, S, C)
    scale = None if scale_NC is None else ctypes.c_void_p(scale_NC.data_ptr())
    getattr(library, _NAMES[packed_NQKE.dtype])(
        ctypes.c_void_p(x_NSK.data_ptr()),
        ctypes.c_void_p(packed_NQKE.data_ptr()),
        scale,
        ctypes.c_void_p(bias_NC.data_ptr()),
        ctypes.c_void_p(y_NSC.data_ptr()),
        *map(ctypes.c_int64, (N, S, K, C)),
        ctypes.c_int(torch.get_num_threads()),
    )
    return y_NSC


@torch.library.custom_op("softmoe::packed_product", mutates_args=(), device_types="cpu")
def packed_product(x_NSK: Tensor, packed_NQKE: Tensor, scale_NC: Tensor | None, bias_NC: Tensor) -> Tensor:
    """(x @ w) * scale + bias for stacked weights in panels. An operator of torch's, so that torch.compile takes it."""
    library = _library()
    assert isinstance(library, ctypes.CDLL), library
    return call(library, x_NSK.contiguous(), packed_NQKE, scale_NC, bias_NC)


@cache
def has_bytes() -> bool:
    """Whether the processor multiplies bytes (AVX-512 VNNI)."""
    if not available():
        return False
    x, w, ones = torch.zeros(1, 1, 4), torch.zeros(1, 1, 4 * PANEL, dtype=torch.int8), torch.ones(1, 1)
    return _call_bytes(x, w, ones, ones, ones) is not None


def _call_bytes(x_NSK: Tensor, packed: Tensor, scale_NC: Tensor, sums_NC: Tensor, bias_NC: Tensor) -> Tensor | None:
    library = _library()
    assert isinstance(library, ctypes.CDLL), library
    N, S, K = x_NSK.shape
    C = bias_NC.shape[1]
    assert packed.numel() == N * -(-C // PANEL) * PANEL * K
    assert K % 4 == 0
    tensors = (x_NSK, packed, scale_NC, sums_NC, bias_NC)
    assert all(t.is_contiguous() for t in tensors)
    y_NSC = torch.empty(N, S, C)
    room = (y_NSC, torch.empty(N, S, K, dtype=torch.uint8), torch.empty(N, S, 2))
    done = library.product_bytes(
        *(ctypes.c_void_p(t.data_ptr()) for t in (*tensors, *room)),
        *map(ctypes.c_int64, (N, S, K, C)),
        ctypes.c_int(torch.get_num_threads()),
    )
    return y_NSC if done else None


@torch.library.custom_op("softmoe::byte_product", mutates_args=(), device_types="cpu")
def byte_product(x_NSK: Tensor, packed: Tensor, scale_NC: Tensor, sums_NC: Tensor, bias_NC: Tensor) -> Tensor:
    """As packed_product for int8 weights, with every row of x rounded to bytes too."""
    y_NSC = _call_bytes(x_NSK.contiguous(), packed, scale_NC, sums_NC, bias_NC)
    assert y_NSC is not None, "asked for on a processor that has no such product"
    return y_NSC


@byte_product.register_fake
def _byte_shape(x_NSK: Tensor, packed: Tensor, scale_NC: Tensor, sums_NC: Tensor, bias_NC: Tensor) -> Tensor:
    return x_NSK.new_empty(x_NSK.shape[0], x_NSK.shape[1], bias_NC.shape[1])


@packed_product.register_fake
def _shape(x_NSK: Tensor, packed_NQKE: Tensor, scale_NC: Tensor | None, bias_NC: Tensor) -> Tensor:
    return x_NSK.new_empty(x_NSK.shape[0], x_NSK.shape[1], bias_NC.shape[1])
