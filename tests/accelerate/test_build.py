"""All that is C++ of our own: it is right on this machine and on older ones, and built anew when it changes."""

import ctypes
import platform
import shutil
from pathlib import Path

import pytest

import softmoe
from softmoe.accelerate import activation, attention, build, experts, optimizer
from softmoe.accelerate.build import Kernel
from softmoe.data import shapes_kernel
from softmoe.inference import kernel

ROOMS = (activation, attention, experts, optimizer, shapes_kernel, kernel)
KERNELS: dict[Path, Kernel] = {room.KERNEL.source: room.KERNEL for room in ROOMS}
pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no compiler")


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
