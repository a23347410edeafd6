"""All that is C++ of our own: it is right on this machine and on older ones, and built anew when it changes."""

import ctypes
import errno
import os
import platform
import shutil
from pathlib import Path

import pytest

import softmoe
from softmoe.accelerate import activation, attention, build, experts, frame, muon, optimizer
from softmoe.accelerate.build import Kernel
from softmoe.data import shapes_draw
from softmoe.inference import layers

ROOMS = (activation, attention, experts, frame, muon, optimizer, shapes_draw, layers)
KERNELS: dict[Path, Kernel] = {room.KERNEL.source: room.KERNEL for room in ROOMS}
pytestmark = pytest.mark.skipif(build.turned_off() or not shutil.which("g++"), reason="no compiler, or turned off")


def test_there_is_no_other() -> None:
    assert set(Path(softmoe.__file__).parent.rglob("*.cpp")) == set(KERNELS)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda kernel: kernel.source.stem)
def test_right_here(kernel: Kernel) -> None:
    """A library that gives wrong results would be left out without a word: here it is not."""
    assert kernel.why_not() is None


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86")
@pytest.mark.parametrize("flag", ["-march=x86-64-v3", "-march=x86-64"])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda kernel: kernel.source.stem)
def test_older_processors(kernel: Kernel, flag: str) -> None:
    """The forms for processors with AVX2, and with neither, are right too (this machine can run both)."""
    if "avx2" not in build.processor():
        pytest.skip("this processor has no AVX2")
    assert kernel.self_test(ctypes.CDLL(str(build.build(kernel.source, (flag, *kernel.flags)))))


def test_what_is_included_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed header is another library."""
    monkeypatch.setenv("SOFTMOE_CACHE", str(tmp_path / "cache"))
    source, header = tmp_path / "room" / "one.cpp", tmp_path / "two.h"
    source.parent.mkdir()
    source.write_text('#include "../two.h"\nextern "C" int number() { return TWO; }\n')
    found = []
    for value in (2, 3, 2):
        header.write_text(f"#define TWO {value}\n")
        found.append(build.build(source))
    assert [ctypes.CDLL(str(library)).number() for library in found] == [2, 3, 2]
    assert found[0] == found[2] != found[1]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library of one number, and an empty cache."""
    monkeypatch.setenv("SOFTMOE_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "one.cpp"
    file.write_text('extern "C" int number() { return 1; }\n')
    return file


def number(library: Path) -> int:
    return ctypes.CDLL(str(library)).number()


@pytest.mark.parametrize("damage", ["cut", "emptied", "changed"])
def test_a_damaged_library_is_built_anew(source: Path, damage: str) -> None:
    """A file that a power cut left short or empty, or whose bytes changed, is never loaded."""
    built = build.build(source)
    content = built.read_bytes()
    half = len(content) // 2
    built.unlink()  # it may be loaded: write another file
    built.write_bytes(
        {"cut": content[:half], "emptied": b"", "changed": content[:half] + b"x" + content[half + 1 :]}[damage]
    )
    built.chmod(0o700)
    assert build.build(source) == built
    assert built.read_bytes() == content
    assert number(built) == 1


@pytest.mark.timeout(60)
def test_a_pipe_is_not_waited_for(source: Path) -> None:
    """A pipe with the name of the library is no library: it is built anew."""
    built = build.build(source)
    built.unlink()
    os.mkfifo(built, 0o700)
    assert number(build.build(source)) == 1


@pytest.mark.parametrize("which", ["folder", "library"])
def test_what_others_may_write_is_not_loaded(source: Path, which: str) -> None:
    built = build.build(source)
    (built.parent if which == "folder" else built).chmod(0o777)
    with pytest.raises(build.CannotBuild, match="may be written by others"):
        build.build(source)


def test_what_belongs_to_another_user_is_not_loaded(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.build(source)
    monkeypatch.setattr(build.os, "geteuid", lambda: 12345)
    with pytest.raises(build.CannotBuild, match="belongs to another user"):
        build.build(source)


def test_a_link_is_not_followed(source: Path, tmp_path: Path) -> None:
    """Whoever can make a link there could otherwise choose the code."""
    built = build.build(source)
    built.rename(tmp_path / "elsewhere.so")
    built.symlink_to(tmp_path / "elsewhere.so")
    with pytest.raises(build.CannotBuild, match="is a link"):
        build.build(source)


def test_a_user_without_a_home(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is a folder of their own among the temporary ones."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("SOFTMOE_CACHE")
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    built = build.build(source)
    assert built.is_relative_to(tmp_path)
    assert number(built) == 1


@pytest.mark.parametrize("problem", ["full", "read-only"])
def test_a_cache_that_takes_nothing(source: Path, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No library, and one sentence."""
    number = errno.ENOSPC if problem == "full" else errno.EROFS

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number), "cache")

    monkeypatch.setattr(build, "whole_file", fail)
    with pytest.raises(build.CannotBuild, match=f"the compiled one cannot be kept in cache: {os.strerror(number)}"):
        build.build(source)


def test_a_wrong_library_is_not_used(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails its test is as good as none; turning all off is heard at once."""
    kernel = Kernel("one", lambda library: library.number() == 2)
    kernel.source = source
    assert kernel.why_not() == "its results are wrong on this machine (one.cpp)"
    kernel.forget()
    kernel.self_test = lambda library: library.number() == 1
    assert kernel.why_not() is None
    monkeypatch.setenv("SOFTMOE_ACCELERATE", "off")
    assert kernel.why_not() == "turned off by SOFTMOE_ACCELERATE"
