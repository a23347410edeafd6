"""The README cannot go stale: its code runs, its links lead somewhere, its commands and targets exist."""

import re
from pathlib import Path

import pytest

from softmoe.cli import COMMANDS

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
LOGS = ("experiments", "benchmarks_log")


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL))
def test_code_blocks_run(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every python block runs as it stands."""
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_links_exist() -> None:
    """Every relative link names a file or folder of the project."""
    links = [link for link in re.findall(r"\]\(([^)]+)\)", TEXT) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link.split("#")[0]).exists()] == []


def test_commands_and_targets_exist() -> None:
    """Every `softmoe COMMAND` and `make TARGET` named is real."""
    make = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^ +make ([a-z]+)", TEXT, re.MULTILINE)) <= make
    assert set(re.findall(r"^ +softmoe ([a-z]+)", TEXT, re.MULTILINE)) <= set(COMMANDS)


def test_every_room_is_listed() -> None:
    """The file tree names every room there is, and none that is not."""
    rooms = {path.name for path in (ROOT / "softmoe").iterdir() if (path / "__init__.py").exists()}
    assert set(re.findall(r"^ +softmoe/(\w+)/", TEXT, re.MULTILINE)) == rooms


def test_contributing_names_what_there_is() -> None:
    """Every file and folder that CONTRIBUTING.md names exists, and every link of the other pages leads somewhere."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rooms = "|".join(path.name for path in (ROOT / "softmoe").iterdir() if path.is_dir())
    named = set(re.findall(r"`((?:softmoe|tests|docs)/[\w./]*)`", text))
    named |= {f"softmoe/{path}" for path in re.findall(rf"`((?:{rooms})/[\w./]+\.py)`", text)}
    assert len(named) > 15
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
    for page in [ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]:
        links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
        assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == [], page.name


def test_files_named_in_the_pages_exist() -> None:
    """Every `room/file.py` that the README or a guide names is there; logs keep the names of their time."""
    rooms = "|".join(path.name for path in (ROOT / "softmoe").iterdir() if path.is_dir())
    pages = [ROOT / "README.md", *(p for p in (ROOT / "docs").glob("*.md") if p.stem not in LOGS)]
    for page in pages:
        named = re.findall(rf"\b(?:softmoe/)?((?:{rooms})/[\w/]+\.(?:py|cpp))", page.read_text())
        homes = (ROOT / "softmoe", ROOT / "tests")
        assert [path for path in named if not any((home / path).exists() for home in homes)] == [], page.name
