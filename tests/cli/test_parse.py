"""One dataclass a command: how its fields become words and options."""

import contextlib
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import pytest

from softmoe.cli import main
from softmoe.cli.parse import parse
from softmoe.evaluate import Evaluate, evaluate
from softmoe.evaluate.api import Names


@dataclass(frozen=True)
class Toy:
    """A toy."""

    model: str | Path
    """Where it is."""
    files: Names
    _: KW_ONLY
    image_size: int | tuple[int, int] | None = None
    cache: bool = True
    """Keep nothing."""
    loud: bool = False
    labels: str | Path | None = None
    shots: tuple[int, ...] = (1, 5)


def test_words_and_options():
    """Fields by place are words, the others options; flags turn the default over; sizes are written as pixels."""
    assert parse(Toy, ["m", "a", "b"], "toy") == Toy("m", ("a", "b"))
    words = ["m", "a", "--image-size", "32x48", "--no-cache", "--loud", "--labels", "x.json", "--shots", "2", "3"]
    expected = Toy("m", ("a",), image_size=(32, 48), cache=False, loud=True, labels=Path("x.json"), shots=(2, 3))
    assert parse(Toy, words, "toy") == expected
    assert type(parse(Toy, words, "toy")) is Toy
    with pytest.raises(ValueError, match="--image-size must be pixels or HEIGHTxWIDTH, like 224 or 224x320, got 'big'"):
        parse(Toy, ["m", "a", "--image-size", "big"], "toy")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        *((name, "MODEL DATA") for name in ("evaluate", "fewshot", "zeroshot", "retrieve", "inspect")),
        *((name, "MODEL") for name in ("doctor", "export", "plan", "predict", "search", "serve")),
        ("report", "RUNS"),
        ("finetune", "MODEL DATA"),
    ],
)
def test_help_names_what_is_needed(command: str, words: str, capsys: pytest.CaptureFixture[str]):
    """The usage line has MODEL and DATA where the command takes them, and every help ends well."""
    with contextlib.suppress(SystemExit):
        assert main([command, "--help"]) == 0
    usage = capsys.readouterr().out.split("\n\n")[0]
    assert words in " ".join(usage.split())


def test_functions_take_the_fields_of_their_command(tmp_path: Path):
    """`evaluate(...)` is `Evaluate(...).run()`: an option that is no field is refused by the dataclass."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'splitt'"):
        evaluate("model", "data", splitt="val")  # pyright: ignore[reportCallIssue]
    for call in (lambda: evaluate(tmp_path / "no", "data"), Evaluate(tmp_path / "no", "data").run):
        with pytest.raises(ValueError, match="there is no folder"):
            call()
