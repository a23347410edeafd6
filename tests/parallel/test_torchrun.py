"""The command line under torchrun: one rank speaks and saves, and a rank that is killed is started again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from parallel.ranks import start_ranks
from parallel.trouble import command_rank

from softmoe import create_model, from_pretrained, save_pretrained

ROOT = Path(__file__).parents[2]
RECIPE = """
import os, signal, threading, time
from pathlib import Path
from parallel.trouble import make_config

RUNS = Path(__file__).parent / "runs"


def die_after_a_checkpoint():
    while not (RUNS / "recipe" / "checkpoints" / "last").exists():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)


def recipe():
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
    if first and os.environ.get("RANK") == "1":
        threading.Thread(target=die_after_a_checkpoint, daemon=True).start()
    return make_config(RUNS, steps=40)
"""


def test_finetune_is_finished_by_one_rank(tmp_path):
    """Two ranks fine-tune; rank 0 alone says where the model is, and writes it whole."""
    tower = create_model("soft_ti4_2e", image_size=16, num_classes=3, width=16, heads=2, mlp_dim=16, depth=2)
    save_pretrained(tower, tmp_path / "start", preprocessing={"image_size": (16, 16), "crop": "resize"})
    argv = [
        "finetune",
        str(tmp_path / "start"),
        "shapes?size=16&length=32",
        "--runs",
        str(tmp_path),
        "--run-name",
        "run",
    ]
    argv += ["--steps", "2", "--data.batch-size", "8", "--data.workers", "0", "--evaluation.examples", "8"]
    (first, said), (second, silence) = [
        value or pytest.fail(error) for value, error in start_ranks(2, command_rank, [*argv, "--log.quiet", "True"])
    ]
    assert (first, second, silence) == (0, 0, "")
    assert str(tmp_path / "run" / "model") in said
    assert from_pretrained(tmp_path / "run" / "model").config.depth == 2


@pytest.mark.slow
def test_killed_rank_is_started_again(tmp_path):
    """kill -9 of rank 1 after its first checkpoint: torchrun restarts both, which go on from there to the end."""
    (tmp_path / "recipe.py").write_text(RECIPE)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    train = [
        "-m",
        "softmoe",
        "train",
        str(tmp_path / "recipe.py"),
        "--parallel.expert",
        "2",
        "--parallel.timeout",
        "60",
    ]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launch, *train]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "resuming" in done.stderr
    run = tmp_path / "runs" / "recipe"  # named like the file
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 41))
    assert (run / "model" / "model.safetensors").exists()
    assert done.stdout.count("val/loss") == 1, "only one process speaks"
