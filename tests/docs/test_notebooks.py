"""The notebooks run from the first cell to the last, in short form: two steps where a reader takes hundreds."""

import json
import re
from pathlib import Path

import matplotlib
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))


def test_there_are_three() -> None:
    """And none keeps outputs, which would go stale and weigh much."""
    assert len(NOTEBOOKS) == 3
    for notebook in NOTEBOOKS:
        cells = json.loads(notebook.read_text())["cells"]
        assert cells[0]["cell_type"] == "markdown"
        assert not any(cell.get("outputs") for cell in cells)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one namespace, in order, in an empty folder."""
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "notebook"}
    for number, cell in enumerate(json.loads(notebook.read_text())["cells"]):
        if cell["cell_type"] == "code":
            code = re.sub(r"^(STEPS|EXAMPLES) = \d+$", r"\1 = 2", "".join(cell["source"]), flags=re.MULTILINE)
            exec(compile(code, f"{notebook.name} cell {number}", "exec"), names)
    matplotlib.pyplot.close("all")
