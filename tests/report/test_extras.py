"""Few-shot numbers and inspection figures that lie in runs' folders come into the page."""

import json
from dataclasses import replace
from pathlib import Path

from softmoe.recipes import quickstart
from softmoe.report.runs import RunRecord, accuracies, fewshot_table, gains, inspection_figures, refitted_heads
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


def test_a_head_in_closed_form_is_told(tmp_path):
    """Metrics end with the head that was trained; a model that got another one afterwards is told with its numbers."""
    results = {"results": {"val/top1": 0.5, "val/loss": 0.25}}
    for name, made in (("plain", results), ("new", results | {"head": {"blocks": [5, 11]}}), ("strange", {"head": 3})):
        (run_in(tmp_path, name).folder / "model").mkdir()
        (tmp_path / name / "model" / "config.json").write_text(json.dumps({"provenance": made}))
    runs = [RunRecord(name, tmp_path / name, TrainConfig(), 3, ()) for name in ("plain", "new", "strange", "missing")]
    (told,) = refitted_heads(runs)
    assert "model of new has a head in closed form: top-1 50.00%, loss 0.250." in told


def test_figures(tmp_path):
    """PNG files in figures/, sorted, inside the page."""
    run = run_in(tmp_path, "one")
    assert inspection_figures(run) == []
    (run.folder / "figures" / "slot_images.png").write_bytes(b"\x89PNG")
    assert inspection_figures(run) == [("slot images", "data:image/png;base64,iVBORw==")]


def test_a_gain_over_dense_is_shown_with_its_control():
    """With one expert and the same slots the page says what slots and experts give; without, that it is missing; runs
    with other slots, with slots that stay or on other data are no control, and tokens merged are not dense."""

    def run(name: str, top1: float, data: str = "a", **model) -> RunRecord:
        config = quickstart.recipe()
        config = replace(config, model=config.model.change(**model), data=replace(config.data, train=data))
        row = {"step": 1, "val/top1": top1, "flops": 3.0 if name == "dense" else 2.0, "device_seconds": 4.0}
        return RunRecord(name, Path(name), config, 3, (row,))

    dense, many = run("dense", 0.4, router="dense"), run("many", 0.7)
    one = run("one", 0.5, num_experts=1, slots_per_expert=16)
    others = [
        run("few", 0.6, num_experts=1, slots_per_expert=4),
        run("other", 0.6, "b", num_experts=1, slots_per_expert=16),
        run("stays", 0.6, num_experts=1, slots_per_expert=16, slots_stay=True),
        run("merged", 0.6, router="dense", merge=(1, 4)),
    ]
    whole = "All of it: +30.0 points top-1 (many 70.0 %, dense 40.0 %); dense had 1.50 times the FLOPs and 1.00 times"
    assert gains([dense, one, many]) == [
        "What slots give: +10.0 points top-1 (one 50.0 %, dense 40.0 %).",
        "What experts give: +20.0 points top-1 (many 70.0 %, one 50.0 %).",
        f"{whole} the seconds.",
    ]
    missing, _ = gains([dense, many, *others])
    assert missing.startswith("What experts give is not known: no run has one expert with the slots of many")
    assert "--model.slots-per-expert 16" in missing
    assert gains([many, one]) == gains([dense]) == []
