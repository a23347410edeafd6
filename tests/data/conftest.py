"""Small real data sets on disk: every test reads files, none a mock."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpacked files go into the test's folder, not into the user's home."""
    monkeypatch.setenv("SOFTMOE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def picture() -> Callable[..., np.ndarray]:
    """(seed, height, width) -> a smooth random image, (h, w, 3) uint8: it survives JPEG compression well."""

    def make(seed: int, height: int = 24, width: int = 32) -> np.ndarray:
        coarse = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
        return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))

    return make


@pytest.fixture
def encoded() -> Callable[..., bytes]:
    """(image, format) -> the bytes of a file."""

    def encode(image: np.ndarray | Image.Image, form: str = "JPEG", **options: object) -> bytes:
        out = io.BytesIO()
        pil = image if isinstance(image, Image.Image) else Image.fromarray(image)
        pil.save(out, form, **options)
        return out.getvalue()

    return encode


@pytest.fixture
def folder(tmp_path: Path, picture: Callable, encoded: Callable) -> Path:
    """train: 3 classes of 5 images, val: 3 of 2, in several formats, with class names."""
    root = tmp_path / "set"
    endings = [("jpg", "JPEG"), ("png", "PNG"), ("webp", "WEBP"), ("tiff", "TIFF"), ("JPEG", "JPEG")]
    for split, count in (("train", 5), ("val", 2)):
        for label, name in enumerate(("n1", "n2", "n3")):
            (root / split / name).mkdir(parents=True)
            for k in range(count):
                ending, form = endings[k]
                data = encoded(picture(100 * label + k + (50 if split == "val" else 0)), form)
                (root / split / name / f"im{k}.{ending}").write_bytes(data)
    (root / "classes.json").write_text('{"n1": "ant", "n2": "bee", "n3": "cat"}')
    return root


@pytest.fixture
def write_tar() -> Callable[[Path, dict[str, bytes], str], Path]:
    """(path, {name: bytes}, mode) -> a tar of them."""

    def write(path: Path, files: dict[str, bytes], mode: str = "w") -> Path:
        with tarfile.open(path, mode) as tar:  # pyright: ignore[reportCallIssue, reportArgumentType]
            for name, data in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        return path

    return write
