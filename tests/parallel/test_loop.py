"""The training loop on many ranks: equal to one process, and nothing lost whatever happens to a rank."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from parallel.ranks import start_ranks
from parallel.trouble import make_config, train_rank

from softmoe.convert import from_pretrained
from softmoe.machine import bfloat16_works
from softmoe.storage.checkpoint import read_checkpoint
from softmoe.train import OptimSection, ParallelSection, train
from softmoe.train.folder import RunFolder, write_model


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def ended(results: list) -> list[dict]:
    for rank, (_, error) in enumerate(results):
        assert error is None, f"rank {rank}:\n{error}"
    return [value for value, _ in results]


def tensors(folder: Path, step: int = 4) -> dict[str, torch.Tensor]:
    snapshot = read_checkpoint(folder / "checkpoints" / f"step_{step:08d}")
    return {f"{file}/{name}": value for file, values in snapshot.tensors.items() for name, value in values.items()}


def assert_same_run(ours: Path, theirs: Path) -> None:
    """To rounding: weights, average, moments, and every number in the metrics."""
    mine, reference = tensors(ours), tensors(theirs)
    assert mine.keys() == reference.keys()
    for name, value in reference.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-3, atol=1e-5)
    for a, b in zip(metrics(ours), metrics(theirs), strict=True):
        for key in ("step", "loss", "grad_norm", "val/top1", "val/loss", "images", "flops"):
            assert a.get(key, 0) == pytest.approx(b.get(key, 0), rel=1e-5), key


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """The run of one process."""
    torch.set_num_threads(1)
    return train(make_config(tmp_path_factory.mktemp("alone"))).folder.path


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    """The run of two processes that nothing happened to."""
    config = make_config(tmp_path_factory.mktemp("pair"), expert=2, shard=2)
    results = ended(start_ranks(2, train_rank, config))
    assert results[0] == results[1]
    return Path(config.runs) / config.run_name


def test_two_processes_train_as_one(pair, alone):
    """Average, accumulation, clipping, evaluation with an empty last share: the same run, to rounding."""
    assert_same_run(pair, alone)


@pytest.mark.slow
def test_two_processes_with_compact_moments(tmp_path):
    """Moments in bfloat16, in shards, with a resume in between: near the run of one process, whose numbers are rounded
    by other draws."""
    optim = OptimSection(states="bfloat16")
    train(replace(make_config(tmp_path, "one"), optim=optim))
    config = replace(make_config(tmp_path, "two", expert=2, shard=2), optim=optim)
    ended(start_ranks(2, train_rank, replace(config, steps=2)))
    ended(start_ranks(2, train_rank, config))
    mine, reference = tensors(tmp_path / "two"), tensors(tmp_path / "one")
    assert {mine[name].dtype for name in mine if name.endswith("exp_avg_sq")} == {torch.bfloat16}
    for name, value in reference.items():
        torch.testing.assert_close(mine[name], value, rtol=0.05, atol=2e-3)


@pytest.mark.slow
def test_two_processes_read_late(pair, tmp_path):
    """The way of GPUs, on a CPU: the fused update of shards looks at the flag, and numbers are read a step late. The
    bits are those of the usual way."""
    config = make_config(tmp_path, expert=2, shard=2)
    ended(start_ranks(2, train_rank, config, "read late"))
    mine, reference = tensors(tmp_path / "run"), tensors(pair)
    assert all(torch.equal(mine[name], value) for name, value in reference.items())


@pytest.mark.slow
def test_two_processes_compile_each_block(alone, tmp_path):
    """The blocks of a sharded model, each compiled by itself, train as one process does."""
    config = replace(make_config(tmp_path, shard=2), compile=True)
    ended(start_ranks(2, train_rank, config, "quick compiler"))
    assert_same_run(tmp_path / "run", alone)


@pytest.mark.slow
@pytest.mark.skipif(not bfloat16_works(), reason="this machine has no working bfloat16")
def test_weights_travel_in_bfloat16(alone, tmp_path):
    """With precision bfloat16 weights are sent so, gradients are added up and kept in float32: near one process."""
    config = replace(make_config(tmp_path, expert=2, shard=2), precision="bfloat16")
    train(replace(config, run_name="one", parallel=ParallelSection()))
    ended(start_ranks(2, train_rank, config))
    mine, reference = tensors(tmp_path / "run"), tensors(tmp_path / "one")
    assert {value.dtype for value in mine.values()} == {torch.float32}
    losses = [[row["loss"] for row in metrics(tmp_path / name) if "loss" in row] for name in ("run", "one")]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
    for name, value in reference.items():
        if name.startswith("model/"):
            torch.testing.assert_close(mine[name], value, rtol=0.1, atol=0.03)


def test_export(pair):
    """The best checkpoint (the average, which was evaluated) becomes a saved model that needs no second process."""
    best = json.loads((pair / "eval.json").read_text())["best"]["step"]
    saved = write_model(RunFolder(pair))
    model, expected = from_pretrained(pair).state_dict(), tensors(pair, best)
    assert saved.classes is not None
    assert all(torch.equal(value, expected[f"ema/{name}"]) for name, value in model.items())


@pytest.mark.slow
def test_start_from_given_weights(alone, tmp_path):
    """Each rank takes its experts of a saved model: the losses of one process, not those of fresh weights."""
    configs = [make_config(tmp_path, "one", steps=2), make_config(tmp_path, "two", steps=2, expert=2)]
    given = [replace(config, model=replace(config.model, weights=str(alone))) for config in configs]
    train(given[0])
    ended(start_ranks(2, train_rank, given[1]))
    one, two, fresh = (
        [line["loss"] for line in metrics(path)[:2]] for path in (tmp_path / "one", tmp_path / "two", alone)
    )
    assert two == pytest.approx(one, rel=1e-5)
    assert two[1] != pytest.approx(fresh[1], rel=1e-4)  # at first all heads are zero


@pytest.mark.slow
def test_the_number_of_processes_may_change(alone, tmp_path):
    """Two steps on two processes, one alone, one more on two others: the run of one process."""
    config = make_config(tmp_path, steps=2, expert=2)
    ended(start_ranks(2, train_rank, config))
    train(replace(config, steps=3, parallel=ParallelSection()))
    ended(start_ranks(2, train_rank, replace(config, steps=4, parallel=ParallelSection(shard=2))))
    mine, reference = tensors(tmp_path / "run"), tensors(alone)
    for name, value in reference.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("trouble", ["kill", pytest.param("kill while saving", marks=pytest.mark.slow)])
def test_a_killed_rank(trouble, pair, tmp_path):
    """The others end and say why; the same command continues from the last whole checkpoint, to the same bits."""
    config = make_config(tmp_path, expert=2, shard=2, timeout=30.0)
    (_, error), (_, silence) = start_ranks(2, train_rank, config, trouble)
    assert silence == "ended without an answer"
    assert "PeerLost: rank 0 of 2 on" in error
    assert "lost rank 1, which ended or did not come within 30 s (parallel.timeout)" in error
    assert "The same command continues from the last checkpoint" in error
    assert [path.name for path in sorted((tmp_path / "run" / "checkpoints").glob("step_*"))] == ["step_00000002"]
    ended(start_ranks(2, train_rank, config))
    mine, reference = tensors(tmp_path / "run"), tensors(pair)
    assert all(torch.equal(mine[name], value) for name, value in reference.items())
    assert not list((tmp_path / "run" / "checkpoints").glob(".partial*"))


@pytest.mark.slow
def test_a_rank_that_hangs(tmp_path):
    """Waiting ends after parallel.timeout, with a message that names the rank."""
    config = make_config(tmp_path, expert=2, timeout=3.0)
    [(_, error)] = start_ranks(2, train_rank, config, "hang", first=1)
    assert "lost rank 1, which ended or did not come within 3 s (parallel.timeout)" in error


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path, pair):
    """Both save and end; the run then continues to the same bits."""
    config = make_config(tmp_path, expert=2, shard=2)
    results = ended(start_ranks(2, train_rank, config, "stop"))
    assert [(result["step"], result["signal"]) for result in results] == [(3, 15), (3, 15)]
    ended(start_ranks(2, train_rank, config))
    mine, reference = tensors(tmp_path / "run"), tensors(pair)
    assert all(torch.equal(mine[name], value) for name, value in reference.items())


def test_refused_before_training(tmp_path, monkeypatch):
    """One process for two owners, and batches that cannot be shared: one sentence, and no run folder's config."""
    with pytest.raises(ValueError, match="need at least 2 processes, and there is one: torchrun --nproc-per-node 2"):
        train(make_config(tmp_path, expert=2))
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match=r"parallel\.expert must divide the number of processes: got 3 for 4"):
        train(make_config(tmp_path, expert=3))
    assert not (tmp_path / "run" / "config.json").exists()
