"""The inference bench: every way of storing experts has a row, with bytes counted as stored."""

import torch

from softmoe.bench.cases import Contender, StoredWork, compare_prepared, stored_bytes
from softmoe.bench.timing import Probes, soft_layer
from softmoe.inference import prepare
from softmoe.moe import SoftMoE


class SmallProbes(Probes):
    SIZE, WORDS = 32, 1 << 10


def test_rows():
    """One row for the plain layer and each prepared one, saying how far its outputs are."""
    layer = SoftMoE(16, 4, 1, 32).eval()
    found = list(
        compare_prepared(
            "layer", layer, {2: torch.randn(2, 5, 16)}, {2: soft_layer(2, 5, 16, 32, 4, 1)}, ("int8",), SmallProbes(), 0
        )
    )
    assert [row.case for row in found] == ["layer, batch 2"] * 2
    assert found[0].name == "plain float32"
    assert found[1].name.startswith("int8")
    assert all(row.roofline is not None and row.timing.median > 0 for row in found)


def test_bytes_are_those_stored():
    """int8 experts count a quarter of the bytes (scales and biases aside)."""
    layer = SoftMoE(64, 8, 1, 256).eval()
    plain, packed = stored_bytes(layer), stored_bytes(prepare(layer, "int8"))
    assert 0.25 < packed / plain < 0.3
    work = StoredWork(10.0, 0.0, 3.0, packed)
    assert Contender(layer, torch.zeros(1), work).work.forward() == (20.0, packed + 12.0)
