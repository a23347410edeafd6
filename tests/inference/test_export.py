"""Exported files run without softmoe, at any batch size, with the model's outputs."""

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from saved_models import NAMES, tiny

from softmoe.cli import main
from softmoe.data import to_tensor
from softmoe.evaluate import predict
from softmoe.evaluate.inputs import evaluation_transform
from softmoe.inference import export as module
from softmoe.inference.export import export
from softmoe.inference.preprocess import load_image
from softmoe.machine import bfloat16_works
from softmoe.storage import Preprocessing, save_pretrained

HERE = Preprocessing((32, 32))
DOCS = Path(__file__).parents[2] / "docs" / "inference.md"


@pytest.fixture
def model(tmp_path):
    made = tiny()
    save_pretrained(made, tmp_path / "model", classes=NAMES)
    return tmp_path / "model", made


@pytest.mark.parametrize("name", ["soft_ti8_4e2p", "framed", "stay", "tokens_choice_ti8_4e", "vit_ti8", "beside"])
def test_torch_export(name, tmp_path):
    """Soft, placed, dense, sparse, and experts beside the MLP: the file gives the model's outputs at any batch size."""
    special = {
        "beside": lambda: tiny("soft_ti8_4e", expert_dim=3, keep_mlp=True),
        "stay": lambda: tiny("placed_ti8_4e2p", slots_stay=True),
        "framed": lambda: tiny("placed_ti8_4e2p", frame=True, combine_place=False),
    }
    model = special.get(name, lambda: tiny(name))()
    if name == "framed":
        torch.nn.init.normal_(model.get_parameter("encoder.blocks.1.mlp.router.frame.direction"))
    made = export(model, tmp_path / "m.pt2", "torch-export", preprocessing=HERE, classes=NAMES)
    assert max(made.differences.values()) < 1e-5
    program = torch.export.load(made.path).module()
    for batch in (1, 2, 7):
        images = torch.randn(batch, 3, 32, 32)
        with torch.no_grad():
            torch.testing.assert_close(program(images), model(images), rtol=1e-4, atol=1e-5)
    facts = json.loads((tmp_path / "m.pt2.json").read_text())
    assert facts["classes"] == list(NAMES)
    assert facts["preprocessing"]["image_size"] == [32, 32]


@pytest.mark.skipif(not bfloat16_works(), reason="this processor has no working bfloat16")
def test_precision(tmp_path):
    """A file may compute in bfloat16, gives float32, and says so; ONNX has float32 only."""
    model, images = tiny(), torch.randn(5, 3, 32, 32)
    made = export(model, tmp_path / "m.pt2", "torch-export", preprocessing=HERE, precision="bfloat16")
    with torch.no_grad():
        right, found = model(images), torch.export.load(made.path).module()(images)
    assert found.dtype == torch.float32
    assert 1e-5 < (found - right).norm() / right.norm() < 3e-2
    assert json.loads((tmp_path / "m.pt2.json").read_text())["precision"] == "bfloat16"
    with pytest.raises(ValueError, match="ONNX file computes in float32"):
        export(model, tmp_path / "m.onnx", "onnx", preprocessing=HERE, precision="bfloat16")


@pytest.mark.parametrize(
    ("name", "pool"), [("soft_ti8_4e", "mean"), ("soft_ti8_4e", "attention"), ("placed_ti8_4e2p", "class")]
)
def test_onnx(name, pool, tmp_path):
    """ONNX Runtime gives the model's outputs at batch sizes the file was not made with."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = tiny(name, pool=pool)
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
    folder, made = model
    export(made, tmp_path / name, kind, preprocessing=HERE, classes=NAMES)
    pixels = np.random.default_rng(0).integers(0, 256, (12, 20, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((100, 60), Image.Resampling.BICUBIC).save(tmp_path / "photo.jpg")
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (code,) = [block for block in blocks if name in block]
    assert "softmoe" not in code
    assert len(code.splitlines()) <= 12
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    name, probability = done.stdout.rsplit(maxsplit=1)
    (expected,), _ = predict(folder, tmp_path / "photo.jpg")
    assert name == expected.top[0][0]
    assert float(probability) == pytest.approx(expected.top[0][1], abs=1e-3)


def pictures() -> dict[str, tuple[Image.Image, dict]]:
    """File name -> a picture and how it is saved: tall, wide, tiny and large ones in several formats and modes."""
    draw = np.random.default_rng(0)

    def smooth(width: int, height: int, mode: str = "RGB") -> Image.Image:
        coarse = draw.integers(0, 256, (9, 13, len(mode)), dtype=np.uint8)
        small = Image.fromarray(coarse if len(mode) > 1 else coarse[:, :, 0], mode)
        return small.resize((width, height), Image.Resampling.BICUBIC)

    turned = Image.Exif()
    turned[0x0112] = 6
    gray16 = Image.fromarray(draw.integers(0, 65536, (50, 70)).astype(np.uint16))
    return {
        "wide.jpg": (smooth(400, 90), {"quality": 95}),
        "tall.jpg": (smooth(77, 311), {"quality": 95}),
        "large.jpg": (smooth(1333, 901), {"quality": 95}),
        "turned.jpg": (smooth(300, 120), {"quality": 95, "exif": turned}),
        "tiny.png": (smooth(21, 17), {}),
        "wide.png": (smooth(123, 45), {}),
        "clear.png": (smooth(90, 61, "RGBA"), {}),
        "gray.png": (smooth(61, 90, "L"), {}),
        "gray16.png": (gray16, {}),
        "wide.webp": (smooth(200, 111), {"lossless": True}),
    }


@pytest.mark.parametrize("crop", ["central", "resize"])
@pytest.mark.parametrize("antialias", [True, False])
def test_preprocessing_is_that_of_predict(crop, antialias, tmp_path):
    """preprocess.py makes the pixels of the model's transform, exactly; from JPEG within its decoders' rounding."""
    here = Preprocessing((32, 40), crop, antialias=antialias)
    transform = evaluation_transform(here)
    for name, (picture, options) in pictures().items():
        picture.save(tmp_path / name, **options)
        ours = transform.read((tmp_path / name).read_bytes(), name)
        exported = load_image(tmp_path / name, asdict(here))
        assert (exported.shape, exported.dtype) == ((1, 3, 32, 40), np.float32)
        expected = to_tensor(ours)[None].numpy()
        np.testing.assert_allclose(exported, expected, atol=2.5 * 2 / 255 if name.endswith(".jpg") else 1e-6)


def test_preprocess_needs_numpy_and_pillow_alone():
    """The file that is written beside an export imports nothing else."""
    found = re.findall(r"^\s*(?:import|from) (\w+)", module.PREPROCESS.read_text(), re.MULTILINE)
    assert set(found) == {"math", "numpy", "PIL", "preprocess"}  # the last in its example


def test_nothing_is_overwritten(tmp_path):
    """Two exports into one folder keep their own facts; a file that is there is replaced only if that is asked for."""
    for name, classes in (("a.pt2", ("x", *NAMES[1:])), ("b.pt2", ("y", *NAMES[1:]))):
        export(tiny("vit_ti8"), tmp_path / name, "torch-export", preprocessing=HERE, classes=classes)
    assert [json.loads((tmp_path / f"{n}.pt2.json").read_text())["classes"][0] for n in "ab"] == ["x", "y"]
    (tmp_path / "a.pt2.json").unlink()
    with pytest.raises(ValueError, match=r"has a\.pt2 already: .*--overwrite"):
        export(tiny("vit_ti8"), tmp_path / "a.pt2", "torch-export", preprocessing=HERE)
    (tmp_path / "preprocess.py").write_text("# a user's own\n")
    with pytest.raises(ValueError, match=r"has preprocess\.py already"):
        export(tiny("vit_ti8"), tmp_path / "c.pt2", "torch-export", preprocessing=HERE)
    assert not (tmp_path / "c.pt2").exists()
    export(tiny("vit_ti8"), tmp_path / "a.pt2", "torch-export", preprocessing=HERE, overwrite=True)
    assert (tmp_path / "preprocess.py").read_bytes() == module.PREPROCESS.read_bytes()


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
    with pytest.raises(ValueError, match=r"needs \w+: pip install 'softmoe-vit\[export\]'"):
        export(tiny(), tmp_path / "m.onnx", "onnx", preprocessing=HERE)


def test_a_wrong_file_is_removed(tmp_path, monkeypatch):
    """If what was written does not compute what the model does, it is not left behind."""
    monkeypatch.setattr(module, "TOLERANCE", -1.0)
    with pytest.raises(ValueError, match="was removed: its outputs differ"):
        export(tiny(), tmp_path / "m.pt2", "torch-export", preprocessing=HERE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("to", "name"), [("torch-export", "m.pt2"), ("onnx", "m.onnx")])
def test_a_full_disk(to, name, small_disk):
    """The error names the file, and no part of it is left behind to be taken for a model."""
    model = tiny(width=256, mlp_dim=1024)
    with pytest.raises(OSError, match=f"No space left on device: .*disk/{name}"):
        export(model, small_disk / name, to, preprocessing=HERE)
    assert list(small_disk.iterdir()) == []
