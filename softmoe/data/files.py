"""Find and read the files of data sources.

Packed lists of names, files that are images by their ending, tars read by offset, compressed files unpacked once.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import logging
import os
import shutil
import stat
import tarfile
import threading
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from softmoe.machine import is_first_process
from softmoe.paths import cache_folder
from softmoe.storage.files import whole_file

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm", ".pgm")
_RAW = (".raw", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".raf", ".rw2", ".pef")
_UNREAD = (".heic", ".heif", ".avif", ".jp2", ".j2k", ".jxl", ".psd", ".svg", *_RAW)
_UNPACKED_BYTES, _UNPACKED_RATIO = 1_000_000_000, 200  # a .gz may unpack to the larger of so much and so many times it
_HEADER_BYTES = 16_000_000  # of a tar: long names and the like
MAX_NAME = 4096  # characters: the longest path of a file on Linux
MAX_TEXT = 16_000_000  # bytes of what is beside an image: captions, labels
_logger = logging.getLogger("softmoe.data")
_reported: set[Path] = set()


class Names:
    """A list of many strings, kept as one buffer and one array of offsets.

    It is cheap to pickle, and a worker does not touch the reference counts of a million objects, which would copy every
    page of a forked parent.
    """

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
    """Return the bytes of a regular file; -1 for anything else, a dangling link too."""
    try:
        facts = os.stat(path)
    except (OSError, ValueError):
        return -1
    return facts.st_size if stat.S_ISREG(facts.st_mode) else -1


def folders_in(place: Path) -> list[str]:
    """List the folders in a folder, without hidden ones and the one that zip files of macOS bring along."""
    found = (e.name for e in os.scandir(place) if os.path.isdir(e.path) and not e.name.startswith("."))
    return sorted(name for name in found if name != "__MACOSX")


def files_below(folder: Path) -> Iterator[str]:
    """Yield the name of every file below a folder, through links too. A folder is read once: links may make circles."""
    waiting, seen = [""], set()
    while waiting:
        prefix = waiting.pop()
        facts = os.stat(folder / prefix)
        if (facts.st_dev, facts.st_ino) in seen:
            continue
        seen.add((facts.st_dev, facts.st_ino))
        for entry in sorted(os.scandir(folder / prefix), key=lambda entry: entry.name, reverse=True):
            if os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir():
                waiting.append(f"{prefix}{entry.name}/")
            else:
                yield prefix + entry.name


def is_image_name(name: str) -> bool:
    """Tell if a file counts as an image by its ending; hidden files, such as the ._ ones of macOS, do not."""
    return not name.startswith(".") and name.lower().endswith(IMAGE_SUFFIXES)


def report_left_out(where: Path, names: Iterable[str]) -> None:
    """Say which of the files are images that are not read, if any."""
    unread = [name for name in names if name.lower().endswith(_UNREAD) and not name.rpartition("/")[2].startswith(".")]
    if not unread or where in _reported or not is_first_process():
        return
    _reported.add(where)
    counts = Counter(os.path.splitext(name)[1].lower() for name in unread)
    kinds = ", ".join(f"{count} {ending}" for ending, count in sorted(counts.items()))
    _logger.warning("Left out of %s, since these are not read: %s; convert them to JPEG", where, kinds)


_BINARY = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
_one_at_a_time = threading.Lock()


class ByteReader:
    """Reads spans of bytes of one file by pread, which shares no position, so that a handle is safe across forks.

    Without pread (on Windows, which has no forks either) one thread reads at a time. It pickles without the handle.
    """

    def __init__(self, path: Path):
        self.path = path
        self._handle: int | None = None

    def read(self, offset: int, size: int) -> bytes:
        if self._handle is None:
            self._handle = os.open(self.path, os.O_RDONLY | _BINARY)
        if hasattr(os, "pread"):
            return os.pread(self._handle, size, offset)
        with _one_at_a_time:
            os.lseek(self._handle, offset, os.SEEK_SET)
            return os.read(self._handle, size)

    def __getstate__(self) -> dict:
        return {"path": self.path, "_handle": None}

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle is not None:
            os.close(handle)


class _Headers(io.BufferedReader):
    """A tar file that refuses headers of a wrong size, which may claim to have gigabytes."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _HEADER_BYTES:
            raise tarfile.ReadError("a header has a wrong size")
        return super().read(size)


def tar_members(path: Path) -> Iterator[tuple[str, int, int]]:
    """Yield (name, offset, size) of each regular file in an uncompressed tar, in its order.

    Every member must lie within the file and behind the one before; else tarfile might read in circles.
    """
    whole, last = path.stat().st_size, -1
    try:
        with io.FileIO(path) as raw, tarfile.open(fileobj=_Headers(raw), mode="r:") as tar:
            for member in tar:
                if member.offset <= last or member.size < 0:
                    raise tarfile.ReadError(f"the member {member.name[:80]!r} has a wrong size")
                if len(member.name) > MAX_NAME:
                    raise tarfile.ReadError(f"a name has more than {MAX_NAME:,} characters")
                if member.isreg():
                    if member.issparse():
                        raise tarfile.ReadError(f"the member {member.name[:80]!r} is stored with holes")
                    if member.offset_data + member.size > whole:
                        raise tarfile.ReadError(f"the member {member.name[:80]!r} reaches beyond the end of the file")
                    yield member.name.removeprefix("./"), member.offset_data, member.size
                last = member.offset
                tar.members = []  # pyright: ignore[reportAttributeAccessIssue]  # tarfile keeps every member it has seen; we keep our own
    except tarfile.TarError as error:
        raise ValueError(f"The file {path} is not a readable tar ({error}); download or pack it again.") from error
    except (ArithmeticError, EOFError, IndexError, KeyError, OSError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"The file {path} is not a readable tar: a header is damaged; pack it again.") from error


def fetched(address: str) -> Path:
    """Return a copy in the cache, made once, of a file at an address that fsspec knows (s3://, gs://, https://).

    The name of the copy holds the address, the size, and the version or time that the store tells: a changed file is a
    new copy, and reading from it is as exact as from any disk.
    """
    import fsspec

    try:
        system, place = fsspec.core.url_to_fs(address)
        facts = system.info(place)
    except FileNotFoundError as error:
        raise ValueError(f"There is no file {address}.") from error
    except (ImportError, ValueError, OSError) as error:
        raise ValueError(f"Cannot reach {address}: {error}") from error
    version = next((facts[k] for k in ("ETag", "etag", "md5Hash", "mtime", "created") if facts.get(k)), "")
    key = hashlib.blake2b(f"{address}\0{facts.get('size')}\0{version}".encode(), digest_size=8).hexdigest()
    target = cache_folder() / f"{key}-{place.rsplit('/', 1)[-1]}"
    if target.exists():
        return target
    try:
        with whole_file(target) as copy, system.open(place, "rb") as original:
            shutil.copyfileobj(original, copy)
    except OSError as error:
        raise ValueError(f"Cannot copy {address} into {target.parent} ({error}).") from error
    return target


def unpacked(path: Path) -> Path:
    """Return `path` itself, or for a .gz (.tgz) file its uncompressed copy in the cache, made once.

    Several processes may ask at once, and a killed one leaves nothing that looks finished. The name of the copy holds
    the size and time of the original: a changed file is a new copy.
    """
    if file_size(path) < 0:
        raise ValueError(f"The file {path} cannot be read: it is not a plain file.")
    if path.suffix not in (".gz", ".tgz"):
        return path
    status = path.stat()
    original = f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
    key = hashlib.blake2b(original.encode(errors="surrogateescape"), digest_size=8).hexdigest()
    stem = path.stem if path.suffix == ".gz" else path.stem + ".tar"
    target = cache_folder() / f"{key}-{stem}"
    if target.exists():
        return target
    try:
        with whole_file(target) as out, gzip.open(path, "rb") as packed:
            while chunk := packed.read(1 << 20):
                if out.tell() > max(_UNPACKED_BYTES, _UNPACKED_RATIO * status.st_size):
                    raise zlib.error(f"it unpacks to more than {_UNPACKED_RATIO} times its size")
                out.write(chunk)
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, (gzip.BadGzipFile, EOFError, zlib.error)):
            raise ValueError(f"The file {path} is not a whole gzip file ({error}); download it again.") from error
        raise ValueError(
            f"Cannot unpack {path} into {target.parent} ({error}); set SOFTMOE_CACHE to a folder with room."
        ) from error
    return target
