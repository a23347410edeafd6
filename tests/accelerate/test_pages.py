"""Memory that a step frees is the next step's, without new pages."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from softmoe.accelerate import pages

FAULTS = """
import ctypes, resource, sys
import torch
from torch import nn
from softmoe.accelerate import pages

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    blocks = [torch.ones(1_500_000) for _ in range(8)]

def new_pages():
    for _ in range(3):
        step()
    before = faults()
    for _ in range(10):
        step()
    return faults() - before

model = nn.Linear(2, 2)
before = new_pages()
pages.switch_on(model, torch.optim.SGD(model.parameters()))
print(before, new_pages())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="malloc of glibc")
def test_freed_memory_is_used_again() -> None:
    """Ten times eight blocks of 6 MB are 117,000 pages of 4 KiB; once switched on hardly one of them is new."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, env=environment, check=True)
    before, after = map(int, done.stdout.split())
    assert before > 10_000
    assert after < before / 100


def test_who_sets_malloc_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    with pytest.raises(pages.Off, match="MALLOC_ARENA_MAX is set"):
        pages.switch_on(model, torch.optim.SGD(model.parameters()))


def test_inference_keeps_no_memory() -> None:
    with pytest.raises(pages.Off, match="no optimizer"):
        pages.switch_on(nn.Linear(2, 2))
