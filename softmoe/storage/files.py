"""Writing that survives a kill or a power cut, and reading that trusts nobody.

A file or a folder is either the old one or the whole new one.

Everything this package keeps is written through `whole_file` or `whole_folder`: beside the target, flushed to the disk,
then renamed. Files are read up to a limit, and JSON only where it is unambiguous; settings.py reads what is in it.
"""

import errno
import hashlib
import json
import os
import re
import reprlib
import shutil
import stat
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

PARTIAL = ".partial-"
"""Names of folders that are being written begin with this; what a kill leaves of them can be removed."""
MAX_JSON_BYTES = 16_000_000  # as Python values they may take thirty times as much
MAX_BYTES = 64_000_000  # of any other file that is read whole: tokenizers
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # what moves a terminal's cursor, or is no UTF-8
_CANNOT_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS, errno.EISDIR, errno.EACCES, errno.EPERM)


@dataclass(frozen=True)
class FileFacts:
    """Size and checksum of a file, as a manifest or a config.json states them."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> "FileFacts":
        return cls(path.stat().st_size, sha256(path))


@contextmanager
def path_in_errors(path: Path, beside: Path) -> Iterator[None]:
    """Put the path into an error of the system that names none, as that of a full disk, or the one written `beside`."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and str(error.filename) in ("None", str(beside)):
            error.filename = str(path)
        raise


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file to write that takes the place of `path` when the block ends, and leaves `path` alone if it fails.

    Missing folders are made. What is no plain file (a pipe, /dev/stdout) cannot be replaced and is written to directly.
    """
    if path.exists() and not path.is_file():
        with path_in_errors(path, path), path.open("wb") as file:
            yield file
        return
    path = Path(os.path.realpath(path))  # a link stays a link
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name[:50]}.{os.getpid()}-{threading.get_ident()}.tmp")
    with path_in_errors(path, beside):
        try:
            with beside.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_bytes(path: Path, data: bytes) -> Path:
    """Replace the file by these bytes in one step."""
    with whole_file(path) as file:
        file.write(data)
    return path


def write_text(path: Path, text: str) -> Path:
    """Replace the file by this text in one step; characters that UTF-8 does not have become question marks."""
    return write_bytes(path, text.encode(errors="replace"))


def write_json(path: Path, value: Any, indent: int | None = 2) -> Path:
    """Replace the file by this value as JSON in one step."""
    return write_text(path, json.dumps(value, indent=indent) + "\n")


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Give an empty hidden folder to fill, which becomes `target` when the block ends and vanishes if it fails."""
    partial = target.with_name(f"{PARTIAL}{target.name}-{os.getpid()}")
    try:
        with path_in_errors(target, partial):
            empty_folder(partial)
            yield partial
            put_in_place(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def empty_folder(path: Path) -> None:
    """Make the folder, without anything that was in it before."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)


def put_in_place(partial: Path, target: Path) -> None:
    """Flush all files of a folder to the disk and give it the name `target`; what had that name before is removed."""
    for path in sorted(partial.rglob("*")):
        sync_folder(path) if path.is_dir() else sync_file(path)
    sync_folder(partial)
    old = target.with_name(f"{PARTIAL}{target.name}-{os.getpid()}-old")
    for may_try_again in (True, True, False):
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.rename(target, old)
        try:
            os.rename(partial, target)
            break
        except OSError:
            if may_try_again and target.exists():  # a reader has just brought the old one back
                continue
            if old.exists():
                os.rename(old, target)
            raise
    sync_folder(target.parent)
    for folder in replaced(target):
        shutil.rmtree(folder, ignore_errors=True)


def replaced(target: Path) -> list[Path]:
    """List the folders that had the name `target` until `put_in_place` gave them another, for as long as it works."""
    name = re.compile(re.escape(f"{PARTIAL}{target.name}") + r"-\d+-old")
    return sorted(path for path in target.parent.glob(f"{PARTIAL}*-old") if name.fullmatch(path.name))


def bring_back(target: Path) -> None:
    """Give a folder its name again, if a process that was to replace it was killed between its two renames."""
    if not os.path.lexists(target) and (found := replaced(target)):
        with suppress(OSError):  # where nothing may be written it stays as it is
            os.rename(found[-1], target)


def remove_folder(path: Path) -> None:
    """Remove a folder so that a kill in the middle leaves a hidden rest and not a half folder under its name."""
    trash = path.with_name(f"{PARTIAL}{path.name}-{os.getpid()}-gone")
    shutil.rmtree(trash, ignore_errors=True)
    os.rename(path, trash)
    shutil.rmtree(trash, ignore_errors=True)


def sync_file(path: Path) -> None:
    """Wait until the file's contents are on the disk."""
    with path.open("rb+" if os.name == "nt" else "rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make a rename inside the folder durable. Some file systems cannot sync a folder, and need not."""
    if os.name == "nt":  # there a folder cannot be opened
        return
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)


def first_line(error: BaseException) -> str:
    """Say an error in one line, without its full stop and not too long: some libraries quote all they have read."""
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return line.rstrip(".") if len(line) <= 300 else f"{line[:300]} ..."


def sha256(path: Path) -> str:
    if not path.is_file():  # a pipe would be waited for, a device has no end
        raise OSError(f"{path} is missing or no plain file")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def point_link(link: Path, target: str) -> None:
    """Make the symbolic link point to `target` (a name in the same folder), in one step.

    Where the file system or the user's rights allow no links, a small file with the name stands for it.
    """
    beside = link.with_name(f".{link.name}.{os.getpid()}.tmp")
    beside.unlink(missing_ok=True)
    try:
        beside.symlink_to(target)
    except (OSError, NotImplementedError):
        link.unlink(missing_ok=True)
        write_text(link, target + "\n")
        return
    os.replace(beside, link)


def follow_link(link: Path) -> Path:
    """Return the path that `point_link` made `link` lead to; any other path is returned as it is."""
    if link.is_symlink() or not link.is_file() or link.stat().st_size > 255:
        return link
    name = link.read_text(encoding="utf-8", errors="replace").strip()
    target = link.parent / name
    return target if name and Path(name).name == name and target.is_dir() else link


def read_json(path: Path) -> Any:
    """Read a JSON file. ValueError, in one sentence, for anything that is not plain and unambiguous JSON."""
    try:
        text = read_bytes(path, MAX_JSON_BYTES).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    return parse_json(text, path)


def read_bytes(path: Path, most: int = MAX_BYTES) -> bytes:
    """Read a plain file of at most `most` bytes; ValueError for larger ones, and at once for pipes and devices."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} cannot be read: it is not a plain file")
        if status.st_size > most:
            raise ValueError(f"{path} cannot be read: it has {status.st_size:,} bytes, more than {most:,} are not read")
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error


def check_path(path: Path) -> Path:
    """Return the path of a folder for weights; ValueError for one that is not UTF-8, where safetensors reads none."""
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"weights cannot be kept in {printable(str(path))}: its name is not UTF-8") from error
    return path


def check_names(names: Iterable[str], where: Any) -> tuple[str, ...]:
    """Return the names of classes; ValueError for one that is not UTF-8 or has control characters of terminals."""
    known = tuple(names)
    for name in known:
        if _CONTROL.search(name):
            raise ValueError(
                f"The class {name!a:.200} of {where} has a name that is not UTF-8 or has control characters; rename it."
            )
    return known


def printable(text: str) -> str:
    """Return at most 200 characters of a stranger's text, on one line, with escapes for what no terminal shows."""
    text = text if len(text) <= 200 else f"{text[:200]}..."
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def parse_json(text: str | bytes, where: str | Path, *, unique: bool = True) -> Any:
    """Parse a JSON text. ValueError for keys that are there twice (if `unique`), deep nesting and endless numbers."""
    try:
        return json.loads(text, object_pairs_hook=_unique if unique else None)
    except RecursionError as error:
        raise ValueError(f"{where} is not valid JSON: it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"the key {reprlib.repr(max(counts, key=counts.__getitem__))} is there twice")
    return found
