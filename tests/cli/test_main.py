"""The front of the command line: help, version, and mistakes that end in one line."""

import subprocess
import sys
import types

import pytest

from softmoe import __version__
from softmoe.cli import COMMANDS, main


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


@pytest.mark.parametrize("error", [ValueError("no such width"), FileNotFoundError(2, "No such file", "a.txt")])
def test_a_mistake_is_one_line(error, monkeypatch, capsys):
    """What a command raises for the user's mistake is printed as one line, exit code 2, no traceback."""

    def fails(argv: list[str]) -> int:
        raise error

    monkeypatch.setitem(sys.modules, "softmoe.cli.cost", types.SimpleNamespace(main=fails))
    assert main(["cost", "vit_s16"]) == 2
    assert capsys.readouterr().err == f"softmoe: error: {error}\n"


def test_our_own_mistakes_are_not_hidden(monkeypatch):
    """A bug keeps its traceback."""

    def fails(argv: list[str]) -> int:
        raise AssertionError("broken")

    monkeypatch.setitem(sys.modules, "softmoe.cli.cost", types.SimpleNamespace(main=fails))
    with pytest.raises(AssertionError, match="broken"):
        main(["cost"])


def test_commands_get_the_rest_and_give_the_exit_code(monkeypatch):
    """Arguments after the command reach it untouched."""
    seen = []
    command = types.SimpleNamespace(main=lambda argv: seen.append(argv) or 7)
    monkeypatch.setitem(sys.modules, "softmoe.cli.cost", command)
    assert main(["cost", "vit_s16", "--json"]) == 7
    assert seen == [["vit_s16", "--json"]]


def test_interrupt(monkeypatch):
    """Ctrl-C ends quietly with the shell's code."""

    def stopped(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "softmoe.cli.cost", types.SimpleNamespace(main=stopped))
    assert main(["cost"]) == 130


def test_as_a_module():
    """`python -m softmoe` is the command."""
    done = subprocess.run([sys.executable, "-m", "softmoe", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"softmoe {__version__}\n", "")
