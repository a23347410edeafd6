"""All that is C++ of our own: it is right on this machine and on older ones, and built anew when it changes."""

import ctypes
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from softmoe import compiled
from softmoe.data import shapes_kernel
from softmoe.inference import kernel
from softmoe.models import attention
from softmoe.moe import gelu, rows
from softmoe.train import adamw

RIGHT: dict[Path, Callable[[ctypes.CDLL], bool]] = {
    Path(attention.__file__).with_name("attention.cpp"): attention._right,
    Path(gelu.__file__).with_name("gelu.cpp"): gelu._right,
    Path(rows.__file__).with_name("rows.cpp"): rows._right,
    Path(adamw.__file__).with_name("adamw.cpp"): adamw._right,
    Path(shapes_kernel.__file__).with_name("shapes_draw.cpp"): shapes_kernel._right,
    kernel.SOURCE: kernel.right,
}
pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no compiler")


def test_there_is_no_other() -> None:
    assert set(Path(compiled.__file__).parent.rglob("*.cpp")) == set(RIGHT)


@pytest.mark.parametrize("room", [attention, gelu, rows, adamw, shapes_kernel, kernel], ids=lambda room: room.__name__)
def test_right_here(room: ModuleType) -> None:
    """A library that gives wrong results would be left out without a word: here it is not."""
    found = room.kernel() if room is adamw else room._library()
    assert isinstance(found, ctypes.CDLL), found


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86")
@pytest.mark.parametrize("flag", ["-march=x86-64-v3", "-march=x86-64"])
@pytest.mark.parametrize("source", [s for s in RIGHT if s.stem != "product"], ids=lambda source: source.stem)
def test_older_processors(source: Path, flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forms for processors with AVX2, and with neither, are right too (this machine can run both)."""
    if "avx2" not in compiled.processor():
        pytest.skip("this processor has no AVX2")
    monkeypatch.setenv("SOFTMOE_CACHE", str(tmp_path))
    flags = (flag, "-ffp-contract=off") if source.stem == "shapes_draw" else (flag,)
    assert RIGHT[source](ctypes.CDLL(str(compiled.build(source, flags))))


def test_what_is_included_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed header is another library."""
    monkeypatch.setenv("SOFTMOE_CACHE", str(tmp_path / "cache"))
    source, header = tmp_path / "room" / "one.cpp", tmp_path / "two.h"
    source.parent.mkdir()
    source.write_text('#include "../two.h"\nextern "C" int number() { return TWO; }\n')
    found = []
    for value in (2, 3, 2):
        header.write_text(f"#define TWO {value}\n")
        found.append(compiled.build(source))
    assert [ctypes.CDLL(str(library)).number() for library in found] == [2, 3, 2]
    assert found[0] == found[2] != found[1]
