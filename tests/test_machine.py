"""The guards that must stand before torch loads."""

import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from softmoe.machine import allow_tf32, bfloat16_works, choose_device, choose_precision, memory_of, safe_instruction_set

CAPS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
GUARDS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", *CAPS)


@pytest.mark.parametrize(
    ("flags", "level", "cap"),
    [
        ("fpu sse avx2", "13", None),
        ("fpu avx512f avx512_fp16 avx512_bf16", "13", None),
        ("fpu avx512_bf16 amx_bf16 amx_tile amx_int8", "13", "AVX512_CORE_BF16"),
        ("fpu avx512_bf16 avx512_fp16 amx_bf16 amx_tile", "28", "AVX512_CORE_FP16"),
        ("fpu avx512_bf16 avx512_fp16 amx_bf16 amx_tile", "29", None),
        ("fpu avx512_bf16 avx512_fp16 amx_bf16 amx_tile", "32", None),
        ("fpu amx_tile", "", None),
        ("", "13", None),
    ],
)
def test_instruction_set(tmp_path, flags, level, cap):
    """A cap only where the CPU has AMX and hides the leaf (0x1D) that says how to use it."""
    core = f"processor\t: 0\nmodel name\t: Some CPU: fast\ncpuid level\t: {level}\nflags\t\t: {flags}\nbugs\t\t:\n"
    other = "processor\t: 1\ncpuid level\t: 99\nflags\t\t: none\n"
    path = tmp_path / "cpuinfo"
    path.write_text(f"{core}\n{other}\n")
    assert safe_instruction_set(path) == cap


@pytest.mark.parametrize("content", ["", "\n\n", "processor: 0\nFeatures: fp asimd\n", "no colon at all"])
def test_instruction_set_of_other_machines(tmp_path, content):
    """Other systems and architectures need no cap."""
    path = tmp_path / "cpuinfo"
    path.write_text(content)
    assert safe_instruction_set(path) is None
    assert safe_instruction_set(tmp_path / "missing") is None


def test_memory_of_a_container(tmp_path):
    """The limit of a container counts where it is below the machine's memory; a GPU that is not here is not known."""
    whole, path = memory_of("cpu", tmp_path / "missing"), tmp_path / "memory.max"
    assert whole is not None
    for said, found in (("max", whole), (str(whole + 1), whole), (str(2**20), 2**20)):
        path.write_text(f"{said}\n")
        assert memory_of("cpu", path) == found
    assert memory_of("cuda:99") is None


def environment_after_import(**given: str) -> dict[str, str]:
    """The guards as a fresh process sees them after `import softmoe`."""
    code = f"import os, softmoe; print([os.environ.get(name, '') for name in {GUARDS}])"
    environment = {name: value for name, value in os.environ.items() if name not in GUARDS}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=environment | given, capture_output=True, text=True, check=True
    )
    values = done.stdout.strip().strip("[]").replace("'", "").split(", ")
    return dict(zip(GUARDS, values, strict=True))


def test_guards_are_set():
    """Threads sleep at barriers; the cap is what this machine needs."""
    guards = environment_after_import()
    assert guards["OMP_WAIT_POLICY"] == "PASSIVE"
    assert guards["GOMP_SPINCOUNT"] == "200"
    assert environment_after_import(OMP_WAIT_POLICY="ACTIVE")["GOMP_SPINCOUNT"] == ""
    assert guards["ONEDNN_MAX_CPU_ISA"] == (safe_instruction_set() or "")
    assert guards["DNNL_MAX_CPU_ISA"] == ""


@pytest.mark.parametrize("name", GUARDS)
def test_the_user_has_the_last_word(name):
    """What the user set stays, under either name of the cap, and no second name is set beside it."""
    value = {"OMP_WAIT_POLICY": "ACTIVE"}.get(name, "AVX2")
    guards = environment_after_import(**{name: value})
    assert guards[name] == value
    if name in CAPS:
        assert sum(bool(guards[cap]) for cap in CAPS) == 1


def test_bfloat16_is_tried_in_a_child():
    """The answer is a bool and we are alive to read it; asked again, it is the same."""
    assert isinstance(bfloat16_works(), bool)
    assert bfloat16_works() is bfloat16_works()


def test_precision_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """auto, float32 and exact are float32; bfloat16 is itself where it works, else float32 with one line."""
    import torch

    cpu, said = torch.device("cpu"), []
    assert [choose_precision(wanted, cpu) for wanted in ("auto", "float32", "exact")] == [None, None, None]
    monkeypatch.setattr("softmoe.machine.bfloat16_works", lambda: True)
    assert choose_precision("bfloat16", cpu, said.append) == torch.bfloat16
    assert not said
    monkeypatch.setattr("softmoe.machine.bfloat16_works", lambda: False)
    assert choose_precision("bfloat16", cpu, said.append) is None
    assert "no working bfloat16" in said[0]


def test_a_named_gpu_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda:1 is set for all that names no device, and so is the GPU of each of several processes; cuda is as it is."""
    import torch

    became: list[torch.device] = []
    monkeypatch.setattr(torch, "empty", lambda *_, device: None)
    monkeypatch.setattr(torch.cuda, "set_device", became.append)
    assert choose_device("cuda:1") == choose_device("cuda", local_rank=1) == torch.device("cuda:1")
    assert choose_device("cuda") == torch.device("cuda")
    assert became == [torch.device("cuda:1")] * 2


@pytest.mark.parametrize("before", ["allow_tf32", "fp32_precision"])
def test_tf32_is_set_by_both_switches(before: str) -> None:
    """Whichever of torch's switches was used before, both say the same afterwards, and nothing warns."""
    import torch

    matmul = torch.backends.cuda.matmul
    old = matmul.fp32_precision
    try:
        for allowed in (True, False):
            setattr(matmul, before, {"allow_tf32": not allowed, "fp32_precision": "tf32"}[before])
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                allow_tf32(allowed)
            assert (matmul.allow_tf32, matmul.fp32_precision) == (allowed, "tf32" if allowed else "ieee")
    finally:
        matmul.fp32_precision = old


PARENT = """
import multiprocessing, os, sys, time
from softmoe.machine import end_with_parent

def child(pipe):
    end_with_parent()
    pipe.send(os.getpid())
    time.sleep(60)

if __name__ == "__main__":
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.get_context("fork").Process(target=child, args=(theirs,)).start()
    print(ours.recv(), flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_children_end_when_their_parent_is_killed(tmp_path):
    """A worker of a killed study does not go on: it is asked to end, as by a user."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    for _ in range(200):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{child}/stat").is_file() and Path(f"/proc/{child}/stat").read_text().split()[2] == "Z":
            return  # ended, and waits for whoever collects orphans
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the child outlived its parent")
