"""`softmoe cost` as a user sees it."""

import json

import pytest

from softmoe.budget import cost
from softmoe.cli import main


def test_models_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    """Totals and parts of each model, in plain ASCII of at most 100 columns."""
    assert main(["cost", "vit_s16", "soft_s16_128e", "experts_choice_h14_128e", "--classes", "29593"]) == 0
    out = capsys.readouterr().out
    assert out.isascii()
    assert max(map(len, out.splitlines())) <= 100
    assert "933,709,471" in out
    assert all(part in out for part in cost("vit_s16").parts)
    assert "one-hot" in out  # the sparse model's other cost


def test_json_holds_the_exact_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """--json, --classes 0 (no head), a size that is not square, and the paper's convention reach the formula."""
    size = ["--image-size", "224x320", "--classes", "0", "--convention", "paper", "--json"]
    assert main(["cost", "tokens_choice_s16_8e", *size]) == 0
    expected = cost("tokens_choice_s16_8e", num_classes=None, image_size=(224, 320), convention="paper")
    assert json.loads(capsys.readouterr().out) == {"tokens_choice_s16_8e": expected.to_dict()}


def test_paper_report(capsys: pytest.CaptureFixture[str]) -> None:
    """All 25 long runs, all 107 Pareto rows and all misfits are printed, in at most 100 columns."""
    assert main(["cost", "--paper"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert max(map(len, lines)) <= 100
    assert sum(line.startswith(("ViT ", "Soft MoE ")) for line in lines) == 25
    assert [int(line.split()[0]) for line in lines if line[:3].strip().isdigit()] == list(range(1, 108))
    assert all(f"\n[{number}] " in out for number in range(1, 6))
    assert "-0.00%" not in out


def test_paper_json(capsys: pytest.CaptureFixture[str]) -> None:
    """The same as values."""
    assert main(["cost", "--paper", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (len(values["long_runs"]), len(values["pareto_runs"]), len(values["misfits"])) == (25, 107, 5)
    assert values["pareto_runs"][101]["misfit"] == "H/14 in the Pareto table"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give the names of models"),
        (["vit_s16", "--paper"], "--paper shows the paper's own models"),
        (["--paper", "--classes", "10"], "--paper shows the paper's own models"),
        (["vit_q16"], "unknown model 'vit_q16', did you mean"),
        (["vit_s16", "--image-size", "224x"], "--image-size must be pixels or HEIGHTxWIDTH"),
        (["vit_s16", "--image-size", "8"], "smaller than one patch"),
        (["vit_s16", "--classes", "-1"], "num_classes must be at least 1"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, one line on stderr, nothing on stdout."""
    assert main(["cost", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_a_misspelled_option_offers_the_right_one(capsys: pytest.CaptureFixture[str]) -> None:
    """--clases is answered with --classes."""
    assert main(["cost", "vit_s16", "--clases", "3"]) == 2
    captured = capsys.readouterr()
    assert "--classes" in captured.out + captured.err
