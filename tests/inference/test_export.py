"""Exported files run without softmoe, at any batch size, with the model's outputs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from saved_models import NAMES, tiny

from softmoe.cli import main
from softmoe.inference import export as module
from softmoe.inference.export import export
from softmoe.storage import Preprocessing, save_pretrained

HERE = Preprocessing((32, 32))
DOCS = Path(__file__).parents[2] / "docs" / "inference.md"


@pytest.fixture
def model(tmp_path):
    made = tiny()
    save_pretrained(made, tmp_path / "model", classes=NAMES)
    return tmp_path / "model", made


@pytest.mark.parametrize("name", ["soft_ti8_4e2p", "tokens_choice_ti8_4e", "vit_ti8"])
def test_torch_export(name, tmp_path):
    """Soft, dense, and a sparse router: the file gives the model's outputs at batch sizes it was not made with."""
    model = tiny(name)
    made = export(model, tmp_path / "m.pt2", "torch-export", preprocessing=HERE, classes=NAMES)
    assert max(made.differences.values()) < 1e-5
    program = torch.export.load(made.path).module()
    for batch in (1, 2, 7):
        images = torch.randn(batch, 3, 32, 32)
        with torch.no_grad():
            torch.testing.assert_close(program(images), model(images), rtol=1e-4, atol=1e-5)
    facts = json.loads((tmp_path / "m.json").read_text())
    assert facts["classes"] == list(NAMES)
    assert facts["preprocessing"]["image_size"] == [32, 32]


@pytest.mark.parametrize("pool", ["mean", "attention"])
def test_onnx(pool, tmp_path):
    """ONNX Runtime gives the model's outputs at batch sizes the file was not made with."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = tiny(pool=pool)
    made = export(model, tmp_path / "m.onnx", "onnx", preprocessing=HERE)
    assert max(made.differences.values()) < 1e-4
    session = onnxruntime.InferenceSession(str(made.path), providers=["CPUExecutionProvider"])
    images = torch.randn(5, 3, 32, 32)
    with torch.no_grad():
        (ours,) = session.run(None, {"images": images.numpy()})
        torch.testing.assert_close(torch.from_numpy(ours), model(images), rtol=1e-3, atol=1e-4)


def test_command(model, tmp_path, capsys, monkeypatch):
    """`softmoe export` writes the file and says how far its outputs are from the model's."""
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(model[0]), "--to", "torch-export"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^model\.pt2  \d", said)
    assert re.search(r"batch 1: outputs differ .* by [\d.e-]+", said)
    assert main(["export", str(model[0]), "--to", "torch-export", "--features", "--out", "f.pt2"]) == 0
    vectors = torch.export.load("f.pt2").module()(torch.randn(2, 3, 32, 32))
    assert vectors.shape == (2, 32)


@pytest.mark.parametrize(("kind", "name"), [("torch-export", "model.pt2"), ("onnx", "model.onnx")])
def test_examples_in_the_docs(kind, name, model, tmp_path):
    """The ten lines of docs/inference.md run as they stand, in a process that cannot import softmoe."""
    if kind == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    from PIL import Image

    folder, made = model
    export(made, tmp_path / name, kind, preprocessing=HERE, classes=NAMES)
    Image.new("RGB", (40, 32), "red").save(tmp_path / "photo.jpg")
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (code,) = [block for block in blocks if name in block]
    assert "softmoe" not in code
    assert len(code.splitlines()) <= 12
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] in NAMES


@pytest.mark.parametrize(
    ("to", "out", "message"),
    [
        ("onnx", "x.pt2", "must end in .onnx"),
        ("torch-export", "none/x.pt2", "there is no folder"),
        ("tflite", "x.tflite", "one of torch-export, onnx, aoti"),
    ],
)
def test_mistakes(to, out, message, tmp_path):
    """Wrong names are one sentence, before any work."""
    with pytest.raises(ValueError, match=message):
        export(tiny(), tmp_path / out, to, preprocessing=HERE)


def test_missing_extra(tmp_path, monkeypatch):
    """Without onnxruntime the sentence says what to install."""
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ValueError, match=r"needs \w+: pip install 'softmoe\[export\]'"):
        export(tiny(), tmp_path / "m.onnx", "onnx", preprocessing=HERE)


def test_a_wrong_file_is_removed(tmp_path, monkeypatch):
    """If what was written does not compute what the model does, it is not left behind."""
    monkeypatch.setattr(module, "TOLERANCE", -1.0)
    with pytest.raises(ValueError, match="was removed: its outputs differ"):
        export(tiny(), tmp_path / "m.pt2", "torch-export", preprocessing=HERE)
    assert list(tmp_path.iterdir()) == []
