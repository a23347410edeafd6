"""The fuzzer sorts what happens rightly, and inputs that once did harm do none: made by code, run as it runs them."""

import json
import struct
import subprocess
import sys
import tarfile
import zlib
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

import fuzz  # noqa: E402
from fuzzing.cases import Case  # noqa: E402
from fuzzing.planted import KINDS, PLANTED, planted_make  # noqa: E402
from fuzzing.sets import SETS  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the fuzzer measures memory as Linux tells it")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("right", "right"),
        ("sentence", "sentence"),
        ("paragraph", "traceback"),
        ("traceback", "traceback"),
        ("wrong", "wrong"),
        ("memory", "memory"),
    ],
)
def test_outcomes_are_told_apart(kind, expected):
    """A planted defect of each kind is seen as that kind."""
    case = Case({"x": b""}, {"kind": kind})
    assert fuzz.attempt(PLANTED, case, None).kind == expected


def test_crashes_and_hangs_are_survived(tmp_path):
    """Children that abort or never answer are counted and replaced; their inputs are kept and run again; a second
    start goes on where the first ended."""
    options = ["--sets", "planted", "--seed", "3", "--processes", "1", "--failures", str(tmp_path / "kept")]
    options += ["--work", str(tmp_path / "work"), "--resume", str(tmp_path / "progress.json"), "--seconds", "120"]

    def run(*more: str) -> int:
        return subprocess.run([sys.executable, str(TOOLS / "fuzz.py"), *options, *more], capture_output=True).returncode

    assert run("--inputs", "8") == 1
    facts = json.loads((tmp_path / "progress.json").read_text())
    assert facts["done"] == {"planted": 8}
    kinds = [planted_make(fuzz.generator(3, "planted", i), KINDS).call["kind"] for i in range(8)]
    assert {"crash", "hang"} <= set(kinds)
    for kind in ("crash", "hang", "right", "wrong", "sentence"):
        assert facts["counts"]["planted"].get(kind, 0) == kinds.count(kind)
    name, case = fuzz.read_case(tmp_path / "kept" / f"planted-3-{kinds.index('crash')}")
    assert (name, case.call) == ("planted", {"kind": "crash"})
    assert run("--inputs", "9") == 1
    assert json.loads((tmp_path / "progress.json").read_text())["done"] == {"planted": 9}


@pytest.mark.parametrize("name", ["images", "archives", "weights"])
def test_inputs_are_functions_of_seed_and_number(name, tmp_path):
    """The same number gives the same input, another one another."""
    tried = SETS[name]
    prepared = tried.prepare(tmp_path)

    def make(index: int) -> Case:
        return tried.make(fuzz.generator(5, name, index), prepared)

    assert make(3) == make(3)
    assert make(3) != make(4)


def jpeg(*segments: bytes) -> bytes:
    return b"\xff\xd8" + b"".join(segments) + b"\xff\xd9"


def frame(marker: int, height: int, width: int) -> bytes:
    body = struct.pack(">BHHB", 8, height, width, 3) + b"\1\x11\0\2\x11\0\3\x11\0"
    return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body


def bitmap(width: int, height: int, data: bytes) -> bytes:
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, 0, 0, 0, 2, 0)
    return b"BM" + struct.pack("<IHHI", 62 + len(data), 0, 0, 62) + head + bytes(8) + data


def negative_member() -> bytes:
    block = bytearray(tarfile.TarInfo("a.jpg").tobuf(tarfile.GNU_FORMAT))
    block[124:136] = b"\xff" * 10 + b"\xfe\x00"
    block[148:156] = b"        "
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + bytes(1024)


GZIP = b"\x1f\x8b\x08" + bytes(7) + zlib.compress(b"x")
PAST = {
    "postscript": ("images", {"image": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"}, {"min_side": None}),
    "large frame": ("images", {"image": jpeg(frame(0xC2, 65000, 65000))}, {"min_side": 1}),
    "many scans": ("images", {"image": jpeg(frame(0xC2, 64, 64), b"\xff\xda\0\2" * 9000)}, {"min_side": None}),
    "run-length jump": ("images", {"image": bitmap(40_000_000, 1, b"\0\2\0\xff" * 4)}, {"min_side": None}),
    "negative member": ("archives", {"train.tar": negative_member()}, {"uri": "wds:{folder}/{{split}}.tar"}),
    "zlib in gzip": ("archives", {"train.tar.gz": GZIP}, {"uri": "wds:{folder}/{{split}}.tar.gz"}),
    "not a zip": ("weights", {"x.npz": b"PK\5\6" + bytes(14) + b"\xff" * 4}, {}),
    "long header": ("weights", {"x.safetensors": b"\xff" * 8 + b"{}"}, {}),
    "deep tokenizer": ("tokenizers", {"tokenizer.json": b"[" * 100_000}, {}),
}  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", PAST)
def test_past_failures(name):
    """What crashed, hung or filled the memory once is one clear sentence now."""
    kind, files, call = PAST[name]
    outcome = fuzz.attempt(SETS[kind], Case(files, call), None)
    assert outcome.kind == "sentence", outcome
