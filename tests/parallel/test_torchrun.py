"""The command line under torchrun: a rank that is killed is started again, and the run goes on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
