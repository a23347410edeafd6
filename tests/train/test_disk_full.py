import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from softmoe.storage.files import whole_folder, write_bytes
from softmoe.train import train
from softmoe.train.folder import RunFolder
from softmoe.train.log import read_metrics


def fill(path: Path) -> None:
    """Until nothing more goes in."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x" * 4096)


def test_a_run_survives_a_full_disk(make_config, small_disk: Path, capfd: pytest.CaptureFixture):
    """The disk fills up during steps 3 to 6 of 8: the run says so, keeps its last good checkpoint, loses no line of
    metrics and no step, and saves again when there is room."""
    config = make_config(steps=8, runs=str(small_disk), **{"log.every": 1, "evaluation.every": 1})
    filler, calls = small_disk / "filler", [0]

    def score(model, batches) -> dict[str, float]:
        calls[0] += 1
        if calls[0] == 3:
            folder = RunFolder.of(config).checkpoints
            while not (folder / "step_00000002").exists():  # its save is in the background
                pass
            fill(filler)
        if calls[0] == 7:
            filler.unlink()
        return {"top1": 0.5}

    assert train(config, evaluators={"val": score}).step == 8
    said = capfd.readouterr().err
    assert "could not save step 4" in said
    assert "No space left on device" in said
    assert "training goes on, the last good one is of step 2" in said
    folder = RunFolder.of(config)
    assert [r["step"] for r in read_metrics(folder.metrics) if "loss" in r] == list(range(1, 9))
    assert {p.name for p in folder.checkpoints.iterdir() if not p.is_symlink()} >= {"step_00000008"}
    assert not list(folder.checkpoints.glob(".partial*"))
    assert train(config).step == 8


def test_a_disk_without_room_from_the_start(make_config, small_disk: Path):
    """There is no checkpoint to continue from, and the run does not speak of one; the error names the path."""
    fill(small_disk / "filler")
    with pytest.raises(OSError, match=r"No space left on device: .*page\.html"):
        write_bytes(small_disk / "page.html", b"x" * 4096)
    with (
        pytest.raises(OSError, match=r"No space left on device: .*disk/model"),
        whole_folder(small_disk / "model") as f,
    ):
        (f / "a").write_bytes(b"x" * 4096)
    os.truncate(small_disk / "filler", 1_170_000)  # room for config.json only
    problems = train(make_config(steps=2, runs=str(small_disk))).problems
    assert "step 2 could not be saved; there is no checkpoint. Make room, and the same command starts again" in problems


def test_a_disk_that_cannot_be_written(small_disk: Path):
    """The error names the file that was meant, not the one that is written beside it."""
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(OSError, match=r"Read-only file system: '[^']*disk/page\.html'"):
        write_bytes(small_disk / "page.html", b"x")
