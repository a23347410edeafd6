"""`softmoe selftest` on the processor of this machine, in its quick form."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import softmoe
from softmoe.bench import selftest as module
from softmoe.bench.selftest import CheckFailed, Setup, Unsupported
from softmoe.cli import main


def test_the_page_says_what_is_right_and_what_was_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All checks that a CPU can run are right, the others are named, and nothing of the user is on the page."""
    page = tmp_path / "page.md"
    monkeypatch.setenv("TORCH_HOME", str(Path.home() / "torch"))
    assert main(["selftest", "--quick", "--device", "cpu", "--out", str(page)]) == 0
    text, (shown, errors) = page.read_text(), capsys.readouterr()
    assert not errors
    assert text.startswith("# softmoe selftest on cpu (quick form)\n")
    rows = {
        line.split(" | ")[0].removeprefix("| "): line.split(" | ")[1] for line in text.splitlines() if " | " in line
    }
    expected = dict.fromkeys(module.CHECKS, "ok")
    expected |= dict.fromkeys(("Triton kernels", "waits", "torch.compile", "several devices"), "not tested")
    found = {name: rows[name] for name in expected}
    if found["bfloat16"] == "not tested":  # a machine without it
        expected["bfloat16"] = "not tested"
    assert found == expected
    assert f"{sum(state == 'ok' for state in found.values())} checks are right, 0 wrong" in text
    assert "| Triton kernels | not tested | not on a CUDA device |" in text
    assert "images/s" in text
    assert (
        "\n- routers: Every router in float32 on the device against float64 on the CPU, outputs and gradients.\n"
        in text
    )
    assert all(f"\n- {name}: " in text for name in module.CHECKS)
    assert f"softmoe {softmoe.__version__}; torch {torch.__version__}; " in text
    assert "TORCH_HOME=~/torch" in text
    assert str(Path.home()) not in text
    assert shown.endswith(f"wrote {page}\n")


@pytest.mark.slow
def test_many_processes_compute_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes of a CPU, as copies, as shards and with owned experts, have the loss of one; another is wrong."""
    said = module.spread(Setup(torch.device("cpu"), True, tmp_path), 2)
    assert "4 steps on 2 devices" in said
    assert [part.split(":")[0] for part in said.split("; ")[1:]] == ["copies", "shards", "owned experts"]
    monkeypatch.setattr(module, "_loss_of", lambda setup, name, processes, *more: float(processes))
    with pytest.raises(CheckFailed, match="copies: off by 1"):
        module.spread(Setup(torch.device("cpu"), True, tmp_path), 2)


def test_what_is_wrong_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong check and one that ends in an error are WRONG, with the reason and exit code 1; others still run."""

    def wrong(setup: Setup) -> str:
        raise CheckFailed("off by 1e+00, more than 1e-03")

    def broken(setup: Setup) -> str:
        raise RuntimeError(f"CUDA error: an illegal memory access in {tmp_path}/x")

    def missing(setup: Setup) -> str:
        raise Unsupported("no second device")

    def small(setup: Setup) -> str:
        raise torch.OutOfMemoryError("CUDA out of memory")

    checks = {"a": wrong, "b": broken, "c": missing, "d": lambda setup: "fine", "e": small}
    monkeypatch.setattr(module, "CHECKS", checks)
    page = tmp_path / "page.md"
    assert main(["selftest", "--device", "cpu", "--out", str(page)]) == 1
    text = page.read_text()
    assert "1 checks are right, 2 wrong, 2 not tested here (c, e)." in text
    line = broken.__code__.co_firstlineno + 1
    assert "| b | WRONG | RuntimeError: CUDA error: an illegal memory access in " in text
    assert f"tests/bench/test_selftest.py:{line}) |" in text
    assert "| e | not tested | the device has not enough free memory for this check |" in text
    assert not any(folder in text for folder in (str(Path.home()), str(tmp_path), str(Path(__file__).parents[2])))


def test_a_wait_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the warnings that torch gives on CUDA those in the middle of a run count, with their lines; none is right."""

    class AsIfCuda(Setup):
        cuda = True  # pyright: ignore[reportAssignmentType,reportIncompatibleMethodOverride]

    setup, mode, told = AsIfCuda(torch.device("cpu"), True, tmp_path), ["default"], []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda value: told.append(value) or mode.append(value))
    assert module.waits(setup) == "none in 7 steps"
    assert (told.count("warn"), mode[-1]) == (7, "default")
    plain = module.make_objective

    def make_waiting(config: Any) -> Any:
        def objective(model: Any, batch: Any) -> Any:
            if mode[-1] == "warn":
                warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
            return real(model, batch)

        real = plain(config)
        return objective

    monkeypatch.setattr(module, "make_objective", make_waiting)
    monkeypatch.setattr(module, "_config", partial(renamed, module._config))
    with pytest.raises(CheckFailed, match=r"waits at .*test_selftest.py:\d+ \(7 times\)"):
        module.waits(setup)


def renamed(config: Any, setup: Setup, name: str, *more: Any, **changes: Any) -> Any:
    return config(setup, f"{name}-again", *more, **changes)


def test_a_loss_that_does_not_fall_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of training can fail: without learning rate, and with memory that grows."""
    from dataclasses import replace

    plain, grown = module._config, iter(range(0, 10**12, 10**9))
    setup = Setup(torch.device("cpu"), True, tmp_path)
    monkeypatch.setattr(module, "_memory", lambda _: next(grown))
    with pytest.raises(CheckFailed, match="it grows"):
        module.steps(setup)
    monkeypatch.setattr(
        module,
        "_config",
        lambda *a, **k: replace(c := plain(*a, **k), run_name="still", schedule=replace(c.schedule, peak=1e-9)),
    )
    with pytest.raises(CheckFailed, match="it does not fall"):
        module.steps(setup)
