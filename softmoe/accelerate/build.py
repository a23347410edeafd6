"""Build our C++ files with the machine's compiler, keep them in the cache folder, test them and load them.

No compiler, or one that fails, is no error: there is a sentence instead of a library, and the caller computes the same
with torch, more slowly. `SOFTMOE_ACCELERATE=off` asks for that.

A library is code that runs as the user, so the cache is trusted only as far as it can be checked: folder and file
belong to this user, nobody else may write them, and the file ends in a sum of its bytes. One that is cut or damaged is
built anew.
"""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from softmoe.machine import CPUINFO
from softmoe.paths import cache_folder
from softmoe.storage.files import whole_file

SOURCES = Path(__file__).with_name("cpp")
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-fno-math-errno", "-Wno-psabi")
_NATIVE = ("-march=native",)
_INCLUDE = re.compile(r'^#include "(.+)"', re.MULTILINE)
_SUM_BYTES = 32
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class CannotBuild(Exception):
    """Raised where a library cannot be built or trusted; the text says why in one sentence."""


class Kernel:
    """One file of cpp/, which is built, tested and loaded when it is first used.

    `self_test` gets the library and says whether its results are right; a wrong one is never used.
    """

    def __init__(self, name: str, self_test: Callable[[ctypes.CDLL], bool], flags: tuple[str, ...] = ()):
        self.source, self.self_test, self.flags = SOURCES / f"{name}.cpp", self_test, flags
        self._found: ctypes.CDLL | str | None = None

    def why_not(self) -> str | None:
        """Return the reason why there is no library, or None where it works."""
        if turned_off():
            return "turned off by SOFTMOE_ACCELERATE"
        if self._found is None:
            self._found = self._load()
        return None if isinstance(self._found, ctypes.CDLL) else self._found

    @property
    def available(self) -> bool:
        return self.why_not() is None

    @property
    def library(self) -> ctypes.CDLL:
        """The loaded library; only to be asked for where it is `available`."""
        assert self.available, self.why_not()
        assert isinstance(self._found, ctypes.CDLL)
        return self._found

    def forget(self) -> None:
        """Look for compiler and cache again at the next use."""
        self._found = None

    def _load(self) -> ctypes.CDLL | str:
        try:
            found = ctypes.CDLL(str(build(self.source, (*_NATIVE, *self.flags))))
        except (CannotBuild, OSError) as error:
            return str(error)
        return found if self.self_test(found) else f"its results are wrong on this machine ({self.source.name})"


def turned_off() -> bool:
    return os.environ.get("SOFTMOE_ACCELERATE", "on").lower() in ("off", "0", "no")


def call(function: Callable[..., Any], *arguments: Tensor | np.ndarray | int | float | None, threads: int = 0) -> Any:
    """Call a compiled function with these arguments and, last, the number of threads (0: as many as torch uses).

    Tensors are passed by their addresses, whole numbers as int64, others as float32. The caller keeps the tensors alive
    and has checked their shapes.
    """
    return function(*map(_as_c, arguments), ctypes.c_int(threads or torch.get_num_threads()))


def _as_c(argument: Tensor | np.ndarray | int | float | None) -> Any:
    if argument is None:
        return None
    if isinstance(argument, Tensor | np.ndarray):
        return ctypes.c_void_p(argument.data_ptr() if isinstance(argument, Tensor) else argument.ctypes.data)
    return ctypes.c_int64(argument) if isinstance(argument, int) else ctypes.c_float(argument)


def build(source: Path, native: tuple[str, ...] = _NATIVE) -> Path:
    """Return the shared library, compiled if it is not in the cache. Its name is a hash of all that it depends on."""
    compiler = next((c for c in (os.environ.get("CXX"), "g++", "clang++", "c++") if c and shutil.which(c)), None)
    if compiler is None:
        raise CannotBuild("no C++ compiler was found (g++ or clang++)")
    depends_on = "\0".join([*_texts(source), compiler, *_FLAGS, *native, platform.machine(), processor()])
    key = hashlib.blake2b(depends_on.encode(), digest_size=12).hexdigest()
    try:
        target = cache_folder() / "kernels" / f"{source.stem}-{key}.so"
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        check_owner(target.parent)
        if is_whole(target):
            return target
        with _locked(target.parent):
            if not is_whole(target):  # another process may have built it meanwhile
                _compile([compiler, *_FLAGS, *native, str(source)], target)
    except OSError as error:
        where = error.filename or cache_folder()
        raise CannotBuild(f"the compiled {source.stem} cannot be kept in {where}: {error.strerror}") from error
    return target


def _compile(command: list[str], target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="softmoe-") as folder:
        made = Path(folder) / target.name
        try:
            done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, timeout=300)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CannotBuild(f"{command[0]} could not be run: {error}") from error
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or ["it said nothing"]
            raise CannotBuild(f"{command[0]} failed: {lines[0].strip()}")
        content = made.read_bytes()
    if not target.is_file():
        target.unlink(missing_ok=True)  # a pipe would be written to, not replaced
    with whole_file(target) as file:
        os.chmod(file.name, 0o700)
        file.write(content + _sum(content))


def check_owner(path: Path) -> None:
    """Raise CannotBuild if another user could have written to this path."""
    facts = path.lstat()
    if stat.S_ISLNK(facts.st_mode):
        raise CannotBuild(f"{path} is a link, and code is not loaded through one")
    if hasattr(os, "geteuid") and facts.st_uid != os.geteuid():
        raise CannotBuild(f"{path} belongs to another user, so code from there is not loaded; set SOFTMOE_CACHE")
    if facts.st_mode & _WRITABLE_BY_OTHERS:
        raise CannotBuild(f"{path} may be written by others, so code from there is not loaded: chmod go-w {path}")


def is_whole(library: Path) -> bool:
    """True if the file is there and ends in the checksum of its bytes. CannotBuild if others may write it."""
    try:
        check_owner(library)
        if not library.is_file():  # a pipe would be waited for
            return False
        content = library.read_bytes()
    except FileNotFoundError:
        return False
    return len(content) > _SUM_BYTES and _sum(content[:-_SUM_BYTES]) == content[-_SUM_BYTES:]


def _sum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_SUM_BYTES).digest()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process build at a time, so that many that start together build each library once."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system: several may build, each file is whole
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # nor on this file system
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _texts(source: Path) -> list[str]:
    """Return the text of a file, and of those beside it that it includes."""
    text = source.read_text("utf-8")
    return [text, *(t for name in _INCLUDE.findall(text) for t in _texts(source.parent / name))]


def processor() -> str:
    """Return the description that -march=native depends on; a cache folder may be shared by different machines."""
    try:
        text = CPUINFO.read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    kept = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in text.splitlines() if line.startswith(kept)}))
