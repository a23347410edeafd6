"""idx files, scikit-learn's digits and Hugging Face sets."""

import gzip
import pickle

import numpy as np
import pytest

from softmoe.data import open_source


def _idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes() + array.tobytes()


@pytest.fixture
def mnist(tmp_path):
    """Six training images and four test images of 7 x 5 pixels, one pair of files compressed."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (10, 7, 5), dtype=np.uint8)
    labels = np.array([0, 1, 2, 3, 4, 9, 1, 1, 0, 2], dtype=np.uint8)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(_idx(pixels[:6]))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(_idx(labels[:6]))
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(_idx(pixels[6:])))
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(_idx(labels[6:])))
    return tmp_path, pixels, labels


def test_idx(mnist):
    """Images and labels as stored; the classes are those of the training labels."""
    path, pixels, labels = mnist
    train, val = open_source(f"idx:{path}", "train"), open_source(f"idx:{path}", "val")
    assert (len(train), len(val), len(train.classes), len(val.classes)) == (6, 4, 10, 10)
    for source, first in ((train, 0), (val, 6)):
        for i in range(len(source)):
            example = pickle.loads(pickle.dumps(source))[i]
            assert example.labels == (labels[first + i],)
            assert np.array_equal(example.image, np.repeat(pixels[first + i][..., None], 3, axis=2))


def test_idx_with_other_pixels_is_other_data(mnist):
    """Another fingerprint if a pixel differs, so that features kept of one set are never taken for another's."""
    path, pixels, _ = mnist
    before = open_source(f"idx:{path}", "train").fingerprint
    assert open_source(f"idx:{path}", "train").fingerprint == before
    pixels[3, 2, 1] ^= 1
    (path / "train-images-idx3-ubyte").write_bytes(_idx(pixels[:6]))
    assert open_source(f"idx:{path}", "train").fingerprint != before


def test_idx_mistakes(mnist):
    """Missing, foreign and short files."""
    path, pixels, _ = mnist
    with pytest.raises(ValueError, match="no file extra-images"):
        open_source(f"idx:{path}", "extra")
    (path / "train-images-idx3-ubyte").write_bytes(_idx(pixels[:6])[:-1])
    with pytest.raises(ValueError, match="shorter than its header"):
        open_source(f"idx:{path}", "train")
    (path / "train-images-idx3-ubyte").write_bytes(b"GIF89a..")
    with pytest.raises(ValueError, match="not an idx file"):
        open_source(f"idx:{path}", "train")
    (path / "train-images-idx3-ubyte").write_bytes(_idx(pixels[:5]))
    with pytest.raises(ValueError, match=r"expected \(n, h, w\)"):
        open_source(f"idx:{path}", "train")


def test_digits():
    """Train and val share nothing and together are all 1,797."""
    pytest.importorskip("sklearn")
    train, val = open_source("digits", "train"), open_source("digits", "val")
    assert len(train) + len(val) == 1797
    assert val[0].image.shape == (8, 8, 3)
    assert max(val[i].image.max() for i in range(20)) == 255
    with pytest.raises(ValueError, match="splits train and val"):
        open_source("digits", "test")


def test_hf(folder):
    """A folder read by `datasets` gives the same images and class names as ours."""
    pytest.importorskip("datasets")
    source, plain = open_source(f"hf:{folder}", "train"), open_source(f"folder:{folder}", "train")
    assert source.classes == ("n1", "n2", "n3")
    assert len(source) == len(plain)
    ours = {plain[i].name.split("/", 1)[1]: plain[i] for i in range(len(plain))}
    for i in range(len(source)):
        example = pickle.loads(pickle.dumps(source))[i]
        twin = ours["/".join(example.name.split("/")[-2:])]
        assert example.labels == twin.labels
        assert np.array_equal(example.image, twin.image)
