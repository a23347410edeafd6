"""The guides and the README cannot go stale: their commands run as written, on tiny models, and so does their Python.

Recipes are replaced by their tiny mode (two steps of a model that is hardly one); what a command is given by the page
stays. Commands that serve forever or take minutes are only parsed. Each page is played in a folder of its own, with a
few photos and, where a page builds on an earlier one, with the run it names.
"""

import re
import runpy
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import tyro
from PIL import Image
from safetensors.torch import save_file

import softmoe
from softmoe import recipes
from softmoe.cli import main

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "convert"))
from plain import PlainViT, flax_names, timm_names  # noqa: E402

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", DOCS / "start.md", *sorted((DOCS / "guides").glob("*.md"))]
WITH_PYTHON = [DOCS / "start.md", *sorted((DOCS / "guides").glob("*.md")), *sorted((DOCS / "concepts").glob("*.md"))]
LONG = {"serve", "bench", "study", "quickstart"}
MAKE = re.compile(r"^([a-z-]+):", re.MULTILINE)


def run_name(words: list[str]) -> str | None:
    """The run that a command makes."""
    if words[1:2] not in (["train"], ["finetune"]):
        return None
    return words[words.index("--run-name") + 1] if "--run-name" in words else words[2]


def tiny(words: list[str]) -> list[str]:
    """The same words for two steps of small images."""
    small = {"--steps": "2", "--epochs": "1", "--image-size": "48"}
    return [small.get(before, word) for before, word in zip(["", *words], words, strict=False)]


class Parsed(Exception):
    """Raised in place of the work of a long command, once its words were understood."""


def page_name(page: Path) -> str:
    return page.stem


def commands(page: Path) -> list[list[str]]:
    """The words of every command in the page's sh blocks, and of the README's indented ones but for its list of all."""
    text = re.sub(r"## Commands\n.*?\n## ", "", page.read_text(), flags=re.DOTALL)
    lines = [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    lines += [line.strip() for line in re.findall(r"^    ((?:softmoe|make|torchrun) .*)$", text, re.MULTILINE)]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the pages speak of, in which recipes are tiny and generated test sets small."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOFTMOE_CACHE", str(tmp_path / "cache"))
    load = recipes.load
    monkeypatch.setattr(recipes, "load", lambda name, variant="tiny": load(name, variant))
    monkeypatch.setattr("softmoe.data.shapes._EVALUATION_LENGTH", 104)
    rng = np.random.default_rng(0)

    def photo(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (40, 48, 3), dtype=np.uint8)).save(path)

    for place, count in (("photos/cat", 12), ("photos/dog", 12), ("other_photos/owl", 6), ("other_photos/hen", 6)):
        for number in range(count):
            photo(tmp_path / place / f"{number}.jpg")
    for place in ("holiday.jpg", "more_photos/a.jpg", "more_photos/b.jpg", "holiday_photos/a.jpg"):
        photo(tmp_path / place)
    for folder in ("pairs", "photos_with_captions"):
        for split in ("train", "val"):
            for number in range(8):
                photo(tmp_path / folder / split / f"{number}.jpg")
                (tmp_path / folder / split / f"{number}.txt").write_text(f"a photo of number {number}\n")
    plain = PlainViT(dim=64, heads=1, hidden=64, patch=8, grid=(4, 4)).float()
    save_file({name: t.detach().contiguous() for name, t in timm_names(plain).items()}, "vit_tiny.safetensors")
    np.savez("vit_b16.npz", **flax_names(plain))
    return tmp_path


def parse_only(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a command understand its words, and stop there."""
    real = tyro.cli

    def stop(what, *given, **options):
        if isinstance(what, type):  # a function would run
            real(what, *given, **options)
        raise Parsed

    monkeypatch.setattr(tyro, "cli", stop)
    with pytest.raises(Parsed):
        main(words)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_commands_run_as_written(page: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command of the page is understood and ends well; what it needs is there or was made by one before it."""
    found = commands(page)
    assert found or "```sh" not in page.read_text()
    needed = {run for words in found for run in re.findall(r"runs/(\w+)", " ".join(words))}
    for run in ("small_data", "dense"):
        if run in needed and run not in map(run_name, found):
            assert main(["train", "small_data", "--data.train", "photos", "--run-name", run]) == 0
    for words in found:
        if words[0] == "make":
            assert words[1] in MAKE.findall((ROOT / "Makefile").read_text())
        elif words[0] == "torchrun":
            assert words[words.index("-m") + 1] == "softmoe"
            assert main([*words[words.index("-m") + 2 :], "--dry-run"]) == 0
        elif words[0] == "python":
            monkeypatch.setattr(sys, "argv", [str(ROOT / words[1]), *words[2:]])
            runpy.run_path(str(ROOT / words[1]), run_name="__main__")
        elif words[1] in LONG:
            with monkeypatch.context() as patch:
                parse_only(words[1:], patch)
        else:
            wanted = (0, 1) if words[1] == "doctor" else (0,)  # what two steps made is not well
            assert main(tiny(words[1:])) in wanted, words


@pytest.mark.parametrize("page", WITH_PYTHON, ids=page_name)
def test_python_runs_as_written(page: Path, workspace: Path) -> None:
    """Every Python block of the page runs by itself."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    for number, block in enumerate(blocks):
        script = workspace / f"block_{number}.py"
        script.write_text(block)
        runpy.run_path(str(script))


def test_the_reference_names_what_there_is() -> None:
    """Every public name of the package and of its layers has a place in the reference."""
    top, moe = ((DOCS / "api" / f"{page}.md").read_text() for page in ("top", "moe"))
    assert [name for name in softmoe.__all__ if f"softmoe.{name}`" not in top] == []
    assert [name for name in softmoe.moe.__all__ if f"softmoe.moe.{name}\n" not in moe] == []
    rooms = {page.stem for page in (DOCS / "api").glob("*.md")} - {"index", "top"}
    for room in rooms:
        assert (ROOT / "softmoe" / room / "__init__.py").exists(), room
