"""Other people's libraries, for tests that use the real thing where it is installed."""

import importlib
import importlib.util
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

TESTS = str(Path(__file__).parent)
_declared: list[torch.library.Library] = []


def declare_torchvision() -> None:
    """Declare the operators of torchvision, none of which others' vision transformers use.

    It comes compiled for one build of torch, and cannot be imported beside another without them.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.submodule_search_locations is None or hasattr(torch.ops.torchvision, "nms"):
        return
    text = (Path(spec.submodule_search_locations[0]) / "_meta_registrations.py").read_text()
    library = torch.library.Library("torchvision", "DEF")
    for name in re.findall(r'(?:register_meta\("|register_fake\("torchvision::)(\w+)"', text):
        library.define(f"{name}(Tensor x) -> Tensor")
    _declared.append(library)


def real_timm() -> Any:
    """Import timm, or skip the test."""
    if any(importlib.util.find_spec(name) is None for name in ("timm", "torchvision")):
        pytest.skip("timm is not installed")
    declare_torchvision()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("timm")


def real_transformers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import transformers, or skip the test; it would take our folder tests/accelerate for a library it knows."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    declare_torchvision()
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != TESTS])
    return pytest.importorskip("transformers")
