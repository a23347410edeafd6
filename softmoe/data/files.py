"""Files the sources stand on: packed lists of names, tars read by offset, compressed files unpacked once."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from softmoe.machine import cache_folder


class Names:
    """A million strings as one buffer and one array of offsets: cheap to pickle, and a worker does not touch
    the reference counts of a million objects (which would copy every page of a forked parent)."""

    def __init__(self, names: Iterable[str]):
        encoded = [name.encode("utf-8", "surrogateescape") for name in names]
        self.blob = b"".join(encoded)
        self.ends = np.cumsum([len(e) for e in encoded], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        start = int(self.ends[index - 1]) if index else 0
        return self.blob[start : int(self.ends[index])].decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))


def file_size(path: str | Path) -> int:
    """Bytes of a regular file; -1 for anything else, a dangling link too."""
    try:
        facts = os.stat(path)
    except (OSError, ValueError):
        return -1
    return facts.st_size if stat.S_ISREG(facts.st_mode) else -1


class ByteReader:
    """Spans of bytes of one file, by pread: no shared position, so a handle is safe across forks. Pickles
    without it."""

    def __init__(self, path: Path):
        self.path = path
        self._handle: int | None = None

    def read(self, offset: int, size: int) -> bytes:
        if self._handle is None:
            self._handle = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        return os.pread(self._handle, size, offset)

    def __getstate__(self) -> dict:
        return {"path": self.path, "_handle": None}

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle is not None:
            os.close(handle)


def tar_members(path: Path) -> Iterator[tuple[str, int, int]]:
    """(name, offset, size) of each regular file in an uncompressed tar, in the order of the tar."""
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                if member.isreg():
                    yield member.name.removeprefix("./"), member.offset_data, member.size
                tar.members = []  # pyright: ignore[reportAttributeAccessIssue]  # tarfile keeps every member it has seen; we keep our own
    except tarfile.TarError as error:
        raise ValueError(f"The file {path} is not a readable tar ({error}); download or pack it again.") from error


def unpacked(path: Path) -> Path:
    """`path` itself, or for a .gz (.tgz) file its uncompressed copy in the cache, made once.

    The copy is written under a temporary name and moved into place, so several processes may ask at once and
    a killed one leaves nothing that looks finished. Its name holds the size and time of the original: a
    changed file is a new copy.
    """
    if path.suffix not in (".gz", ".tgz"):
        return path
    status = path.stat()
    key = hashlib.blake2b(
        f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}".encode(), digest_size=8
    ).hexdigest()
    stem = path.stem if path.suffix == ".gz" else path.stem + ".tar"
    target = cache_folder() / f"{key}-{stem}"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{key}-")
    try:
        with os.fdopen(handle, "wb") as out, gzip.open(path, "rb") as packed:
            shutil.copyfileobj(packed, out, 1 << 20)
        os.replace(temporary, target)
    except (OSError, EOFError) as error:
        if isinstance(error, (gzip.BadGzipFile, EOFError)):
            raise ValueError(f"The file {path} is not a whole gzip file ({error}); download it again.") from error
        raise ValueError(
            f"Cannot unpack {path} into {target.parent} ({error}); set SOFTMOE_CACHE to a folder with room."
        ) from error
    finally:
        Path(temporary).unlink(missing_ok=True)
    return target
