"""One dataclass a command: how its fields become words and options."""

import contextlib
from dataclasses import KW_ONLY, dataclass, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from softmoe import create_model, save_pretrained
from softmoe.cli import FILES, main
from softmoe.cli.parse import parse
from softmoe.evaluate import Evaluate, evaluate
from softmoe.evaluate.api import Names, OnDevice
from softmoe.machine import bfloat16_works
from softmoe.moe import SoftRouter


@dataclass(frozen=True)
class Toy:
    """A toy."""

    model: str | Path
    """Where it is."""
    files: Names
    _: KW_ONLY
    image_size: int | tuple[int, int] | None = None
    cache: bool = True
    """Whether anything is kept."""
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


def test_the_help_of_no_cache_is_true(capsys: pytest.CaptureFixture[str]):
    """The sentence speaks of the field, whose default is shown, and says what the flag does."""
    with contextlib.suppress(SystemExit):
        main(["fewshot", "--help"])
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--no-cache Whether features are kept in" in words
    assert "with --no-cache they are not. (default: True)" in words


def test_functions_take_the_fields_of_their_command(tmp_path: Path):
    """`evaluate(...)` is `Evaluate(...).run()`: an option that is no field is refused by the dataclass."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'splitt'"):
        evaluate("model", "data", splitt="val")  # pyright: ignore[reportCallIssue]
    for call in (lambda: evaluate(tmp_path / "no", "data"), Evaluate(tmp_path / "no", "data").run):
        with pytest.raises(ValueError, match="there is no folder"):
            call()


NO_MODEL_IS_RUN = ("CostArguments", "UploadArguments", "Upcycle")  # the last on the processor only
OF_ITS_OWN = ("PlanArguments", "SelftestArguments")  # devices that need not be here; every precision


def has_run(value: Any) -> bool:
    """True for a command that stands in a room."""
    return getattr(value, "__module__", "").startswith("softmoe.") and hasattr(value, "run")


def test_every_command_that_runs_a_model_says_where_and_how():
    """--device and --precision come from one place, and no command that takes a model is without them."""
    modules = [import_module(f"softmoe.cli.{file}") for file in FILES]
    ours = [v for m in modules for v in vars(m).values() if getattr(v, "__module__", "") == m.__name__ or has_run(v)]
    commands: list[type[Any]] = [command for command in ours if is_dataclass(command)]  # pyright: ignore[reportAssignmentType]
    assert len(commands) > 20
    for command in commands:
        found = {f.name for f in fields(command)}
        runs = ("device" in found or found & {"model", "models"}) and command.__name__ not in NO_MODEL_IS_RUN
        if runs and command.__name__ not in OF_ITS_OWN:
            assert issubclass(command, OnDevice), command.__name__


@pytest.mark.skipif(not bfloat16_works(), reason="this processor has no working bfloat16")
@pytest.mark.parametrize("command", ["inspect", "doctor", "soup"])
def test_the_model_computes_in_the_precision_that_is_asked_for(command, tmp_path, monkeypatch):
    """Products are bfloat16's while the model runs, and float32's if nothing is said on a processor."""
    options = {"image_size": 16, "width": 8, "heads": 2, "mlp_dim": 8, "depth": 1, "blocks": (0,), "num_classes": 3}
    save_pretrained(create_model("soft_ti8_2e", **options), tmp_path / "m", classes=("circle", "square", "triangle"))
    found, plain = [], SoftRouter.forward

    def forward(router, *given):
        found.append(torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16)
        return plain(router, *given)

    monkeypatch.setattr(SoftRouter, "forward", forward)
    for room in ("evaluate.inputs", "transfer.soups"):
        monkeypatch.setattr(f"softmoe.{room}.match_classes", lambda source, *_: (source, "number"))
    monkeypatch.setattr("softmoe.transfer.soups.classification", lambda model, batches: run_once(model, batches))
    model, data = str(tmp_path / "m"), "shapes?size=16"
    words = {
        "inspect": [model, data, "--images", "0", "--examples", "4"],
        "doctor": [model, data, "--images", "4"],
        "soup": [model, model, "--greedy", "--data", data, "--examples", "4"],
    }[command]
    for precision in ("bfloat16", "auto"):
        found.clear()
        out = [] if command == "doctor" else ["--out", str(tmp_path / precision)]
        main([command, *words, *out, "--device", "cpu", "--precision", precision])
        assert set(found) == {precision == "bfloat16"}


def run_once(model, batches):
    model.eval()(next(iter(batches)).images)
    return {"top1": 0.5}
