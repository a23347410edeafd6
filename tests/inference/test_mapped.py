"""Mapped weights: the same outputs, and memory that does not grow with the model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from saved_models import tiny

import softmoe
from softmoe.inference import open_mapped

MEASURE = """
import json, sys, torch, softmoe
from softmoe.inference import open_mapped

def memory(kind):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(kind))

images = torch.randn(1, 3, 32, 32)
softmoe.create_model("soft_ti8_4e", image_size=32, width=64, heads=2, depth=2, num_classes=5)(images)
anonymous, file = memory("RssAnon"), memory("RssFile")
model = open_mapped(sys.argv[1])
kept = []
for block in model.encoder.blocks:
    block.register_forward_hook(lambda *_: kept.append([memory("RssAnon") - anonymous, memory("RssFile") - file]))
with torch.inference_mode():
    for _ in range(2):
        model(images)
print(json.dumps([sum(p.nbytes for p in model.parameters()), *map(max, zip(*kept))]))
"""


def test_same_outputs(tmp_path):
    """Again and again: pages that were let go are read again, and are still the weights."""
    model = tiny(width=64, mlp_dim=256)
    softmoe.save_pretrained(model, tmp_path / "model")
    mapped = open_mapped(tmp_path / "model", verify=True)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(mapped(images), model(images), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_stays_small(tmp_path):
    """A model of 134 MB in two layers: neither is copied, and after each its pages are let go."""
    model = softmoe.create_model(
        "soft_ti8_128e", image_size=32, width=128, mlp_dim=512, heads=2, depth=2, num_classes=5, blocks=(0, 1)
    )
    softmoe.save_pretrained(model, tmp_path / "model")
    environment = os.environ | {"PYTHONPATH": str(Path(softmoe.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "model")],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    weights, anonymous, file = json.loads(done.stdout)
    assert weights > 130e6
    assert anonymous < 0.3 * weights
    assert file < 0.3 * weights
