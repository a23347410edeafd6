"""docs/inference.md cannot go stale: its examples run (those of exported files: see test_export.py)."""

import re
from pathlib import Path

import pytest

from softmoe.cli import COMMANDS

TEXT = (Path(__file__).parents[2] / "docs" / "inference.md").read_text()
BLOCKS = [block for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "softmoe" in block]


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_examples_run(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block that uses softmoe runs as it stands."""
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "inference.md", "exec"), {"__name__": "docs"})


def test_commands_exist() -> None:
    """Every command and tool named is real."""
    assert set(re.findall(r"^ +softmoe ([a-z]+)", TEXT, re.MULTILINE)) <= set(COMMANDS)
    for tool in re.findall(r"python (tools/\w+\.py)", TEXT):
        assert (Path(__file__).parents[2] / tool).exists()
