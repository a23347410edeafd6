"""The front of the command line: help, version, and mistakes that end in one line."""

import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch

import softmoe
from softmoe import __version__, cli, recipes
from softmoe.cli import COMMANDS, main


def test_no_output_at_all():
    """A command whose output was closed does its work: there is nothing to write to, which is no mistake."""
    command = [sys.executable, "-m", "softmoe", "--version"]
    found = subprocess.run(["bash", "-c", '"$@" >&-', "bash", *command], stderr=subprocess.PIPE, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help(flag, capsys):
    """Every command is named with what it does."""
    assert main([flag]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: softmoe COMMAND")
    for name, what in COMMANDS.items():
        assert name in text
        assert what in text


def test_nothing_asked_is_a_mistake(capsys):
    """Without a command the usage is shown and the exit code is 2."""
    assert main([]) == 2
    assert "usage: softmoe" in capsys.readouterr().out


def test_version(capsys):
    """The version of the package."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"softmoe {__version__}\n"


@pytest.mark.parametrize(("name", "hint"), [("csot", "did you mean 'cost'?"), ("zzz", "commands are: ")])
def test_unknown_command(name, hint, capsys):
    """The nearest command is offered, or all of them."""
    assert main([name]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"softmoe: error: unknown command {name!r}")
    assert hint in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("no such width"), "no such width"),
        (FileNotFoundError(2, "No such file", "a.txt"), "a.txt: No such file"),
        (OSError("out of memory"), "out of memory"),
    ],
)
def test_a_mistake_is_one_line(error, said, monkeypatch, capsys):
    """What a command raises for the user's mistake is printed as one line, exit code 2, no traceback."""

    def fails(argv: list[str]) -> int:
        raise error

    monkeypatch.setitem(sys.modules, "softmoe.cli.cost", types.SimpleNamespace(cost_command=fails))
    assert main(["cost", "vit_s16"]) == 2
    assert capsys.readouterr().err == f"softmoe: error: {said}\n"


def test_our_own_mistakes_are_not_hidden(monkeypatch):
    """A bug keeps its traceback."""

    def fails(argv: list[str]) -> int:
        raise AssertionError("broken")

    monkeypatch.setitem(sys.modules, "softmoe.cli.cost", types.SimpleNamespace(cost_command=fails))
    with pytest.raises(AssertionError, match="broken"):
        main(["cost"])


def test_commands_get_the_rest_and_give_the_exit_code(monkeypatch):
    """Arguments after the command reach it untouched."""
    seen = []
    command = types.SimpleNamespace(cost_command=lambda argv: seen.append(argv) or 7)
    monkeypatch.setitem(sys.modules, "softmoe.cli.cost", command)
    assert main(["cost", "vit_s16", "--json"]) == 7
    assert seen == [["vit_s16", "--json"]]


def test_interrupt(monkeypatch):
    """Ctrl-C ends quietly with the shell's code."""

    def stopped(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "softmoe.cli.cost", types.SimpleNamespace(cost_command=stopped))
    assert main(["cost"]) == 130


@pytest.mark.parametrize(("module", "code"), [("difflib", -signal.SIGINT), ("tyro", 130)])
@pytest.mark.parametrize("script", [True, False])
def test_an_early_interrupt(tmp_path: Path, module: str, code: int, script: bool):
    """Ctrl-C while the command or one of its modules is being imported: the end, without a word."""
    (tmp_path / f"{module}.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    (tmp_path / "softmoe").write_text("import sys\nfrom softmoe.cli import main\nsys.exit(main())\n")
    start = [str(tmp_path / "softmoe")] if script else ["-m", "softmoe"]
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, *start, "cost", "vit_ti16"], env=os.environ | {"PYTHONPATH": paths}, capture_output=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, b"", b"")


@pytest.mark.parametrize("start", [[], ["-c"], ["-"], ["mine.py", "-m", "softmoe"]], ids=str)
def test_others_keep_their_interrupt(tmp_path: Path, start: list[str]):
    """Ctrl-C stays an exception for who imports the package: in a script, in a session, however Python was started."""
    text = "import os, signal, softmoe\ntry: os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt: print(1)\n"
    (tmp_path / "mine.py").write_text(text)
    start = [*start, text] if start == ["-c"] else start
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, *start], input=text, env=env, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_an_interrupt_that_was_lost():
    """Ctrl-C that Python could only print, as within a callback of an import, comes again and ends the command."""
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        cli.interrupt_again(types.SimpleNamespace(exc_type=KeyboardInterrupt))
        time.sleep(60)


def test_as_a_module():
    """`python -m softmoe` is the command."""
    done = subprocess.run([sys.executable, "-m", "softmoe", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"softmoe {__version__}\n", "")


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["cost", "--help"], ["cost", "soft_s16_128e"]])
def test_a_reader_that_goes_away(words):
    """`softmoe --help | head -1` is silent, whatever was still to be printed."""
    read, write = os.pipe()
    os.close(read)
    environment = os.environ | {"PYTHONPATH": str(Path(softmoe.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-m", "softmoe", *words], env=environment, stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert (done.stderr, done.returncode) == ("", 0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def recipe(:\n", "line 1"),
        ("\n\nx = 1 +\n", "line 3"),
        ("import nowhere_to_be_found\n", "line 1: ModuleNotFoundError"),
        ("def recipe():\n    return unknown\n", "line 2: NameError"),
        ("x = 1\0\n", "recipe"),
        ("recipe = 5\n", "TypeError"),
    ],
)
def test_mistakes_in_a_recipe(text, words, tmp_path, capsys):
    """A recipe of the user's own that is not Python, or fails, is told with its line."""
    path = tmp_path / "mine.py"
    path.write_text(text)
    assert main(["train", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words in error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (re.error("missing )", "(", 0), "pattern"),
        (RecursionError("maximum recursion depth exceeded"), "nested too deeply"),
        (MemoryError(), "not enough memory"),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
            "--accumulate",
        ),
        (
            torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has 3 GiB of which 1 is free. x"
            ),
            "Tried to allocate 2 GiB. GPU 0 has 3 GiB of which 1 is free. Take fewer images",
        ),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "failed to map segment"),
        (OverflowError("integer division result too large for a float"), "too large"),
        (RuntimeError("Could not determine home directory."), "home directory"),
    ],
)
def test_errors_of_libraries_that_are_users_mistakes(error, words, monkeypatch, capsys):
    """Bad patterns, deep nesting, too little memory, endless numbers and ~nobody end in one line too."""

    def fails(argv: list[str]) -> int:
        raise error

    monkeypatch.setitem(sys.modules, "softmoe.cli.cost", types.SimpleNamespace(cost_command=fails))
    assert main(["cost"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert words in said


def test_no_threads(capsys):
    """A model cannot run on no threads."""
    assert main(["serve", "nothing", "--threads", "0"]) == 2
    assert "threads must be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "doctor", "soup", "predict", "cost"])
def test_every_command_takes_threads(command, capsys):
    """--threads is among the options of all."""
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert "--threads" in capsys.readouterr().out


def test_mistakes_and_help_do_not_wait_for_torch(tmp_path: Path):
    """A list of recipes, a usage error, a help text, a mistyped path and a wrong setting of a run come before torch is
    loaded."""
    words = [[name] for name in COMMANDS if name not in ("demo", "quickstart", "plan", "selftest")]
    words += [[name, "--help"] for name in COMMANDS] + [["train", "quickstrat"], ["study", "nothing"]]
    words += [[name, "mian", "photos"] for name in ("evaluate", "predict", "finetune", "inspect", "doctor", "fewshot")]
    words += [["report", "runs/mian"], ["train", "runs/mian"], ["upcycle", "mian"], ["soup", "mian", "--out", "new"]]
    runs = [["train", "small_data"], ["finetune", "demo", "shapes"], ["train", "lit", "--image", "demo"]]
    runs += [["sweep", "small_data", "seed=0,1"], ["sweep", "finetune", "demo", "shapes", "seed=0,1"]]
    words += [[*run, *wrong] for run in runs for wrong in (["--stpes", "3"], ["--mistyped", "3"], ["--lr", "high"])]
    (tmp_path / "runs" / "main" / "checkpoints" / "step_00000001").mkdir(parents=True)
    for name in ("config.json", "checkpoints/step_00000001/manifest.json"):
        (tmp_path / "runs" / "main" / name).write_text("{}")
    words += [["train", "runs/main", "--stpes", "3"], ["train", "runs/main/checkpoints/step_00000001", "--cool", "3"]]
    wrong = [["--model.router", "sotf"], ["--model.top-k", "2"], ["--model.name", "soft_x16"], ["--accumulate", "7"]]
    words += [["train", name, "--help"] for name in recipes.names()] + [
        ["train", "small_data", *pair] for pair in wrong
    ]
    code = f"""
import contextlib, io, sys
from softmoe.cli import main
for words in {words}:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        with contextlib.suppress(SystemExit):
            assert main(words) == (0 if "--help" in words else 2), words
    assert "torch" not in sys.modules, words
"""
    environment = os.environ | {"PYTHONPATH": str(Path(softmoe.__file__).parent.parent)}
    there = {"cwd": tmp_path, "env": environment}
    done = subprocess.run([sys.executable, "-c", code], **there, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
