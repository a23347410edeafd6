"""The bench room: fair turns, right counts, readable rows. No test here asserts a speed."""

import json
import warnings
from pathlib import Path

import pytest
import torch

from softmoe.bench import cases
from softmoe.bench.report import as_text, save
from softmoe.bench.timing import (
    Probes,
    Roofline,
    Timing,
    interleave,
    machine_line,
    measure_roofline,
    mlp,
    soft_layer,
    summarize,
)
from softmoe.cli import main
from softmoe.moe import SoftMoE

ROOFLINE = Roofline(1e9, 1e9)


def test_interleave_gives_every_function_equal_turns() -> None:
    """Each round calls each function once, and another one goes first each time."""
    calls: list[str] = []
    timings = interleave({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=4)
    assert calls == ["a", "b", "a", "b", "b", "a", "a", "b", "b", "a"]  # warm-up, then four rounds
    assert {name: timing.rounds for name, timing in timings.items()} == {"a": 4, "b": 4}


def test_interleave_stops_when_time_is_up() -> None:
    """At least three rounds, then no more than the time allows."""
    assert interleave({"a": lambda: None}, rounds=100, seconds=0.0)["a"].rounds == 3


def test_summary_is_median_and_quartiles() -> None:
    timing = summarize([1.0, 2.0, 3.0, 4.0, 100.0])
    assert timing.median == 3.0
    assert timing.spread == pytest.approx((52.0 - 1.5) / 2 / 3.0)


def test_roofline_is_the_slower_of_the_two() -> None:
    assert Roofline(10.0, 2.0).seconds(flops=100.0, moved_bytes=2.0) == 10.0
    assert Roofline(10.0, 2.0).seconds(flops=10.0, moved_bytes=200.0) == 100.0


def test_work_counts_the_real_layer() -> None:
    """Parameters as in the module; products as torch counts them."""
    from torch.utils.flop_counter import FlopCounterMode

    layer = SoftMoE(16, 4, 2, 24)
    work = soft_layer(3, 10, 16, 24, 4, 2)
    assert work.params == sum(p.numel() for p in layer.parameters())
    with FlopCounterMode(display=False) as counter:
        layer(torch.randn(3, 10, 16))
    assert work.forward()[0] == counter.get_total_flops()
    assert mlp(5, 16, 24).forward()[0] == 2 * 2 * 5 * 16 * 24


def test_compare_steps_really_train() -> None:
    """A train step moves the weights, a forward step does not."""
    layer = SoftMoE(8, 2)
    x = torch.randn(2, 5, 8)
    before = layer.experts.w1.detach().clone()
    for accelerated in (False, True):
        cases.forward_step(cases.Contender(layer, x, None, accelerated))()
    assert torch.equal(layer.experts.w1, before)
    cases.train_step(cases.Contender(layer, x, None, accelerated=True))()
    assert not torch.equal(layer.experts.w1, before)


def test_rows_become_a_table_and_json(tmp_path: Path) -> None:
    """The first row of a case is its unit; the file holds the machine and all rows."""
    contender = cases.Contender(SoftMoE(8, 2), torch.randn(2, 5, 8), soft_layer(2, 5, 8, 32, 2, 1))
    rows = list(cases.compare("tiny", {"ours": contender}, Probes(), train=True, seconds=0.0))
    assert [row.phase for row in rows] == ["forward", "train"]
    lines = list(as_text(rows))
    assert lines[0] == "tiny, forward"
    assert "1.00 x" in lines[1]
    save(rows, ROOFLINE, tmp_path / "rows.json")
    saved = json.loads((tmp_path / "rows.json").read_text())
    assert saved["machine"]["threads"] == torch.get_num_threads()
    assert len(saved["rows"]) == 2


def test_machine_is_named() -> None:
    assert "GFLOP/s" in machine_line(measure_roofline(rounds=3))


def test_a_gpu_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """`--device cuda` without one, a precision that only a GPU is timed in, and nothing is timed before."""
    if not torch.cuda.is_available():
        assert main(["bench", "layer", "--device", "cuda"]) == 2
        assert "device 'cuda' cannot be used here" in capsys.readouterr().err
    assert main(["bench", "layer", "--precision", "bfloat16"]) == 2
    assert capsys.readouterr().err == "softmoe: error: bfloat16 is timed on a GPU: add --device cuda\n"


def test_unknown_benchmark_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "layers"]) == 2
    assert "layer" in capsys.readouterr().err


def test_loop_is_timed_with_and_without_data(tmp_path: Path) -> None:
    """Bare and fed steps are timed on the tiny recipe; photos are made and every function gets a time."""
    from dataclasses import replace

    from softmoe.bench.loop import make_photos, per_image, step_times
    from softmoe.recipes import quickstart

    config = replace(quickstart.tiny(), runs=str(tmp_path / "runs"))
    bare, batches_on_device = step_times(config, steps=2, rounds=3)
    assert bare.rounds == batches_on_device.rounds == 3
    assert len(make_photos(tmp_path, count=2)) == 2
    assert per_image(lambda: sum(range(100_000)), images=1, seconds=0.0).rounds == 3


def test_cores_that_a_gpu_needs() -> None:
    """Images a second of a GPU at the share of its peak that the planner expects, and the cores that make so many."""
    from softmoe.bench.cases import Row
    from softmoe.bench.loop import RAW, cores_needed
    from softmoe.budget import cost

    lines = list(cores_needed([Row("one core", "image", RAW, Timing(0.01, 0.0, 3), None)]))
    rate = 0.4 * 312e12 / cost("soft_s16_128e").train_flops
    assert len(lines) == 6
    assert f"a100-40 with soft_s16_128e takes {rate:7,.0f} images/s, those of {rate / 100:.1f} such cores" in lines[0]


def test_float32_on_cuda_is_that_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed in float32 on a GPU multiplies as a training run in float32 does there: in TF32."""
    from softmoe.bench import timed_on

    monkeypatch.setattr("softmoe.machine.choose_device", torch.device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of autocast, where there is no GPU, and of torch 2.9's switch
        before = torch.backends.cuda.matmul.allow_tf32
        with timed_on("cuda", "layer"):
            assert torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = before
