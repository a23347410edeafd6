"""Training in one process and in many, evaluation, saving, resuming, preparing and exporting on CUDA tensors that are
fake: every operation finds its inputs on one device, and the host never waits for it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cuda.fake import HERE, build, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
GROUPS = {  # two, for two cores: starting a process takes longer than most cases
    "one tower": (
        *("softmax", "sigmoid", "mixup, mirrored", "cutmix, erased", "balanced", "beside the MLP", "logits only"),
        *("average", "accumulated", "bfloat16", "exact", "checkpointing"),
        *("tokens_choice", "experts_choice", "identity", "uniform", "soft_uniform", "uniform_soft", "placed"),
        *(
            "in the backward pass",
            "in the backward pass, compact",
            "compact moments",
            "sgd",
            "sgd in the backward pass",
        ),
    ),
    "all else": (
        *("shards", "owned experts", "owned pieces", "all in one"),
        *("compiled", "contrastive sigmoid", "contrastive softmax", "contrastive in parts", "locked tower"),
        *("kept features", "adapters", "own objective", "frozen, layer decay", "few shots"),
        *("evaluation", "evaluation in bfloat16", "evaluation of captions", "evaluation of kept features"),
        *("saving", "resuming", "resuming compact moments", "answering", "exporting"),
        *(f"prepared {weights}, {precision}" for weights in ("bfloat16", "int8") for precision in ("float32", "auto")),
    ),
}


@pytest.fixture(scope="session")
def device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("device"))


def traced(device: Path, *cases: str) -> dict[str, Any]:
    """{case: its waits, or the error}, from a process of its own."""
    command = [sys.executable, str(HERE / "traces.py"), str(device), *cases]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("group", GROUPS)
def test_nothing_waits(device: Path, group: str) -> None:
    """Each case is traced to its end, with everything on the device, and without a wait."""
    found = traced(device, *GROUPS[group])
    assert found == {case: [] for case in GROUPS[group]}


def test_waits_are_seen(device: Path) -> None:
    """Reading a number, copying to the host and back from memory that is not pinned, and asking for all work to be done
    are each noted once, and so is an event that is told no device; and no case is left out of the groups."""
    found = traced(device, "waits", "names")
    assert found["waits"] == [
        "read outside of softmoe",
        "copy from cuda to cpu outside of softmoe",
        "copy from cpu to cuda outside of softmoe",
        "synchronize outside of softmoe",
        "event of whichever device is the current one outside of softmoe",
    ]
    assert set(found["names"]) - {"waits", "names"} == {case for group in GROUPS.values() for case in group}
