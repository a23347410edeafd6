"""`softmoe selftest` on the processor of this machine, in its quick form."""

from pathlib import Path

import pytest
import torch

import softmoe
from softmoe.bench import selftest as module
from softmoe.bench.selftest import CheckFailed, Place, Unsupported
from softmoe.cli import main


def test_the_page_says_what_is_right_and_what_was_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All checks that a CPU can run are right, the others are named, and nothing of the user is on the page."""
    page = tmp_path / "page.md"
    assert main(["selftest", "--quick", "--device", "cpu", "--output", str(page)]) == 0
    text, shown = page.read_text(), capsys.readouterr().out
    assert text.startswith("# softmoe selftest on cpu (quick form)\n")
    rows = {
        line.split(" | ")[0].removeprefix("| "): line.split(" | ")[1] for line in text.splitlines() if " | " in line
    }
    expected = dict.fromkeys(module.CHECKS, "ok")
    expected |= dict.fromkeys(("Triton kernels", "torch.compile", "several devices"), "not tested")
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
    assert str(Path.home()) not in text
    assert shown.endswith(f"wrote {page}\n")


@pytest.mark.slow
def test_many_processes_compute_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes of a CPU, as copies, as shards and with owned experts, have the loss of one; another is wrong."""
    said = module.spread(Place(torch.device("cpu"), True, tmp_path), 2)
    assert "4 steps on 2 devices" in said
    assert [part.split(":")[0] for part in said.split("; ")[1:]] == ["copies", "shards", "owned experts"]
    monkeypatch.setattr(module, "_loss_of", lambda place, name, processes, *more: float(processes))
    with pytest.raises(CheckFailed, match="copies: off by 1"):
        module.spread(Place(torch.device("cpu"), True, tmp_path), 2)


def test_what_is_wrong_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong check and one that ends in an error are WRONG, with the reason and exit code 1; others still run."""

    def wrong(place: Place) -> str:
        raise CheckFailed("off by 1e+00, more than 1e-03")

    def broken(place: Place) -> str:
        raise RuntimeError("CUDA error: an illegal memory access")

    def missing(place: Place) -> str:
        raise Unsupported("no second device")

    checks = {"a": wrong, "b": broken, "c": missing, "d": lambda place: "fine"}
    monkeypatch.setattr(module, "CHECKS", checks)
    page = tmp_path / "page.md"
    assert main(["selftest", "--device", "cpu", "--output", str(page)]) == 1
    text = page.read_text()
    assert "1 checks are right, 2 wrong, 1 not tested here (c)." in text
    assert "| b | WRONG | RuntimeError: CUDA error: an illegal memory access |" in text


def test_a_loss_that_does_not_fall_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of training can fail: without learning rate, and with memory that grows."""
    from dataclasses import replace

    plain, grown = module._config, iter(range(0, 10**12, 10**9))
    place = Place(torch.device("cpu"), True, tmp_path)
    monkeypatch.setattr(module, "_memory", lambda _: next(grown))
    with pytest.raises(CheckFailed, match="it grows"):
        module.steps(place)
    monkeypatch.setattr(
        module,
        "_config",
        lambda *a, **k: replace(c := plain(*a, **k), run_name="still", schedule=replace(c.schedule, peak=1e-9)),
    )
    with pytest.raises(CheckFailed, match="it does not fall"):
        module.steps(place)
