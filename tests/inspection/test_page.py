"""The page as a file: complete, small, and no string in it can leave its place."""

import json
import re

import numpy as np
import pytest
from making import HOSTILE, inspection, tiny_model

from softmoe.inspection.collect import Inspection, Sample, Weights, layer_label, logit_table
from softmoe.inspection.page import notes_of, safe_json, write_page


def data_of(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S).group(1))


def test_hostile_strings_stay_strings(tmp_path):
    """Names with markup appear escaped or inside JSON without "<"; the page has its own two scripts only."""
    model = inspection(tiny_model(), HOSTILE, caption=HOSTILE)
    text = write_page(
        [model], tmp_path / "p.html", title=HOSTILE, lead=HOSTILE, figures=[[(HOSTILE, b"png")]]
    ).read_text()
    assert text.count("<script") == text.count("</script>") == 2
    assert "<img src=x" not in text
    assert data_of(text)["models"][0]["images"][0]["caption"] == f"{HOSTILE} 0"
    assert "<" not in safe_json({"a": HOSTILE})
    assert json.loads(safe_json([HOSTILE])) == [HOSTILE]


def test_nothing_is_loaded_from_elsewhere(tmp_path):
    """No address of any server, no other file."""
    model = inspection(tiny_model(), "m")
    text = write_page([model], tmp_path / "p.html", title="t").read_text()
    assert not re.search(r"(https?|wss?|file):|@import|url\(", text)
    assert all(source.startswith("data:") for source in re.findall(r'(?:src|href)="([^"]*)"', text))


def test_notes_are_of_the_columns_that_are_shown():
    """A reader of soft layers is told nothing of dropped tokens, and one of sparse layers nothing of slots."""
    soft, sparse = inspection(tiny_model(), "m"), inspection(tiny_model("tokens_choice"), "n")
    names = {kind: {name for name, _ in notes_of(models)} for kind, models in (("soft", [soft]), ("sparse", [sparse]))}
    assert "tokens for 90 %" in names["soft"] - names["sparse"]
    assert "dropped" in names["sparse"] - names["soft"]
    assert len(notes_of([soft, sparse])) == len(names["soft"] | names["sparse"])


def test_shared_pictures_are_kept_once(tmp_path):
    """Two models of the same images: one set of pictures."""
    models = [inspection(tiny_model(router), router) for router in ("soft", "tokens_choice")]
    data = data_of(write_page(models, tmp_path / "p.html", title="t").read_text())
    assert len(data["pictures"]) == 3
    assert [len(model["images"]) for model in data["models"]] == [3, 3]
    assert [layer["soft"] for model in data["models"] for layer in model["layers"]] == [True, True, False, False]


def test_a_large_page_is_small(tmp_path):
    """12 layers of 128 slots for 16 images of 196 tokens stay below 5 MB, even when the weights are noise."""
    rng = np.random.default_rng(0)
    names = [f"encoder.blocks.{i}.mlp" for i in range(12)]
    samples = []
    for i in range(16):
        tables = {name: Weights(logit_table(2.0 * rng.standard_normal((196, 128)), rng.random(128))) for name in names}
        samples.append(Sample(rng.integers(0, 256, (224, 224, 3)).astype(np.uint8), f"noise {i}", (14, 14), tables))
    real = next(iter(inspection(tiny_model(), "m", count=1).layers.values()))
    layer = real | {"tokens": 196, "experts": 128}
    model = Inspection("large", 16, dict.fromkeys(names, layer), {}, samples)
    path = write_page([model], tmp_path / "p.html", title="large", figures=[[("noise", rng.bytes(300_000))]])
    assert path.stat().st_size < 5_000_000


@pytest.mark.parametrize(
    ("name", "shown"), [("encoder.blocks.11.mlp", "block 11"), ("moe", "moe"), ("a.b.c.d", "a.b.c.d")]
)
def test_short_names(name, shown):
    """Blocks by number, other layers by their path."""
    assert layer_label(name) == shown
