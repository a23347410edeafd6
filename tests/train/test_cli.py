from pathlib import Path

import pytest

from softmoe.cli import main
from softmoe.data import WorkerDied
from softmoe.train import Result
from softmoe.train.folder import RunFolder

OPTIONS = {
    "steps": 2,
    "model.width": 16,
    "model.depth": 2,
    "model.heads": 2,
    "model.mlp-dim": 16,
    "model.num-experts": 4,
    "model.blocks": 1,
    "data.batch-size": 4,
    "data.workers": 0,
    "schedule.warmup": 0,
    "schedule.cooldown": 0,
    "evaluation.examples": 8,
    "log.quiet": True,
}


def run(tmp_path: Path, *more: str) -> int:
    options = [word for key, value in OPTIONS.items() for word in (f"--{key}", str(value))]
    return main(["train", "quickstart", "--runs", str(tmp_path), *options, *more])


def failure(capsys: pytest.CaptureFixture, *argv: str) -> str:
    """What a new user sees for a mistake: exit code 2 and these words."""
    try:
        code = main(["train", *argv])
    except SystemExit as error:  # tyro's own
        code = error.code
    assert code == 2
    shown = capsys.readouterr()
    return " ".join((shown.out + shown.err).replace("│", " ").split())


def test_train_continue_and_branch(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """The three forms of RECIPE: a name, the run's folder, one of its checkpoints."""
    assert run(tmp_path, "--schedule.kind", "constant") == 0
    folder = tmp_path / "quickstart"
    out = capsys.readouterr().out
    assert "val/top1" in out
    assert str(folder / "model") in out
    moved = folder.rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    assert main(["train", "moved", "--steps", "3"]) == 0
    assert "softmoe predict moved IMAGES" in capsys.readouterr().out
    assert not folder.exists()
    cool = ["train", str(moved / "checkpoints" / "step_00000003"), "--cooldown", "2"]
    assert main([*cool, "--dry-run"]) == 0
    assert not (tmp_path / "moved-3-2").exists()
    assert main(cool) == 0
    assert (tmp_path / "moved-3-2" / "checkpoints" / "step_00000005").is_dir()


def test_every_model_setting_is_settable(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Lists, flags and optional values arrive; --dry-run shows the resolved model, cost and memory and runs nothing."""
    more = ["--model.blocks", "0", "1", "--model.identical-init", "True", "--model.scale-init", "3", "--ema", "0.9"]
    assert run(tmp_path, *more, "--optim.decay-patterns", "head", "2.0", "qkv", "0.5", "--dry-run") == 0
    out = capsys.readouterr().out
    for line in ("moe.blocks = (0, 1)", "moe.identical_init = True", "moe.scale_init = 3.0", "ema = 0.9"):
        assert line in out
    assert "optim.decay_patterns = (('head', 2.0), ('qkv', 0.5))" in out
    assert "parameters" in out
    assert "MiB" in out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["quickstart", "--model.widht", "3"], "there is no --model.widht, did you mean --model.width?"),
        (["quickstart", "--steps", "ten"], "--steps"),
        (["quickstart", "--schedule.kind", "sine"], "Expected one of ('rsqrt', 'linear', 'cosine', 'constant')"),
        (["quickstrat"], "did you mean 'quickstart'?"),
        (["quickstart", "--data.train", "folder:/nowhere/at/all"], "/nowhere/at/all"),
        (["quickstart", "--model.name", "soft_s16"], "only models with experts end in their number"),
        (["quickstart", "--warmup", "90", "--steps", "5"], "warm-up and cooldown must fit in the run"),
        (["quickstart", "--resume"], "softmoe train runs/NAME"),
        (["quickstart", "--model.patch-size", "64"], "smaller than one patch of 64 pixels"),
        (["quickstart", "--device", "gpu", "--dry-run"], "it is none of auto, cpu, cuda, cuda:1 and mps"),
        (["quickstart", "--model.num-classes", "5"], "outside the model's head, which has 5 classes"),
        (
            ["quickstart", "--model.width", "96", "--model.heads", "5"],
            "heads must divide the width: 96 is not a multiple of 5",
        ),
    ],
)
def test_mistakes(argv: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    """A misspelt key, a wrong type or value, missing data: exit code 2 and a sentence that helps."""
    assert words in failure(capsys, *argv, "--runs", str(tmp_path), "--data.workers", "0")


def test_help(capsys: pytest.CaptureFixture):
    """Lists the recipes, and for one recipe every key."""
    assert main(["train", "--help"]) == 0
    assert "quickstart, quickstart_dense" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main(["train", "quickstart", "--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    for key in ("--model.slots-per-expert", "--data.transform.mixup", "--schedule.timescale", "--dry-run"):
        assert key in out


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (WorkerDied("A data worker process was stopped"), "A data worker process was stopped"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "out of memory: raise accumulate"),
    ],
)
def test_what_goes_wrong_outside(error: Exception, words: str, monkeypatch, tmp_path: Path, capsys):
    """A killed worker and too little memory end in a sentence too."""

    def fail(config, **_):
        raise error

    monkeypatch.setattr("softmoe.train.train", fail)
    assert run(tmp_path) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(2, 130), (15, 143)])
def test_exit_codes_of_stopped_runs(number: int, code: int, monkeypatch, tmp_path: Path, capsys):
    """As shells have it, 128 + the signal, with the command that continues."""
    result = Result(RunFolder(tmp_path / "x"), 5, {}, number)
    monkeypatch.setattr("softmoe.train.train", lambda config, **_: result)
    assert run(tmp_path) == code
    assert f"to continue: softmoe train {tmp_path / 'x'}" in capsys.readouterr().out
