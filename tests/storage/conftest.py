"""Saved models for the tests of loading them: one file, and shards."""

from pathlib import Path

import pytest
from saved_models import NAMES, tiny

import softmoe


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    softmoe.save_pretrained(tiny(), tmp_path / "m", classes=NAMES, provenance={"run": "r", "step": 7})
    return tmp_path / "m"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    softmoe.save_pretrained(tiny(), tmp_path / "s", max_shard_bytes=40_000)
    return tmp_path / "s"
