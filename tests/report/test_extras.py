"""Few-shot numbers and inspection figures that lie in runs' folders come into the page."""

import json
from pathlib import Path

from softmoe.report.runs import RunRecord, accuracies, fewshot_table, inspection_figures
from softmoe.train import TrainConfig


def run_in(folder: Path, name: str, found: object = None) -> RunRecord:
    (folder / name / "figures").mkdir(parents=True)
    if found is not None:
        (folder / name / "fewshot.json").write_text(json.dumps(found))
    return RunRecord(name, folder / name, TrainConfig(), 3, ())


def test_fewshot(tmp_path):
    """Means over seeds, a column for each data set and number of shots; a dash where a run has none."""
    one = run_in(tmp_path, "one", {"fewshot": {"accuracies": {"digits": {"1": [0.25, 0.75], "5": [0.9]}}}})
    two = run_in(tmp_path, "two")
    assert fewshot_table([one, two]) == [
        ("run", "digits, 1-shot %", "digits, 5-shot %"),
        ("one", "50.00", "90.00"),
        ("two", "-", "-"),
    ]
    assert fewshot_table([two]) == []


def test_strange_files_are_passed_over(tmp_path):
    """Another program's fewshot.json does not end the report."""
    for i, content in enumerate(([], {"fewshot": 3}, {"fewshot": {"accuracies": {"a": {"1": []}}}})):
        assert accuracies(run_in(tmp_path, str(i), content).folder / "fewshot.json") == {}


def test_figures(tmp_path):
    """PNG files in figures/, sorted, inside the page."""
    run = run_in(tmp_path, "one")
    assert inspection_figures(run) == []
    (run.folder / "figures" / "slot_images.png").write_bytes(b"\x89PNG")
    assert inspection_figures(run) == [("slot images", "data:image/png;base64,iVBORw==")]
