"""Features of a whole source, computed once, kept on disk, shared by all evaluators.

    CACHE/features/<key>/{features.npy, labels.npy, indices.npy, facts.json}

The key is a hash of the weights, the data's fingerprint and the preprocessing, so a change of any of them is another
entry. CACHE is $SOFTMOE_CACHE or ~/.cache/softmoe. An entry is written beside and renamed: it is whole or not there.
facts.json holds the hash of every array, which is compared at each use: an entry that was damaged is made again.
"""

import hashlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from softmoe.data import Batch, Source, Transform, batches_on_device, evaluation_batches
from softmoe.data.feed import results_on_host
from softmoe.models import VisionTransformer
from softmoe.moe.record import evaluating
from softmoe.paths import cache_folder
from softmoe.storage.files import read_json, sha256, whole_folder, write_json

_VERSION = 2
_ARRAYS = ("features", "labels", "indices")
Progress = Callable[[int, int], None]
"""Called with the images done and their number."""


@dataclass(frozen=True)
class Features:
    """The features of n images: vectors, labels, and which examples of the source they are."""

    vectors: np.ndarray
    """(n, D) float32, mapped from the file."""
    labels: np.ndarray
    """(n,) class numbers, -1 without; or (n, C) with 1 where a class applies."""
    indices: np.ndarray
    """(n,) which examples of the source these are: unreadable ones are left out."""
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.vectors)

    def single_labels(self) -> np.ndarray:
        if self.labels.ndim != 1 or (len(self.labels) and self.labels.min() < 0):
            raise ValueError("this evaluation needs data with exactly one label per image")
        return self.labels


def extract(
    model: VisionTransformer,
    source: Source,
    transform: Transform,
    *,
    batch_size: int = 256,
    workers: int = 0,
    cache: Path | bool | None = True,
    progress: Progress | None = None,
) -> Features:
    """Return the vector before the head for every image of the source: from the cache if they are there, else computed.

    `cache` is a folder, True for the usual one, or False (None) to keep the features in memory only.
    """
    root = cache_folder() / "features" if cache is True else Path(cache) if cache else None
    if root is None:
        with tempfile.TemporaryDirectory() as folder:
            _compute(model, source, transform, Path(folder), batch_size, workers, progress)
            return _read(Path(folder), source.classes, mapped=False)
    entry = root / cache_key(model, source, transform)
    if not _whole(entry):
        _fill(entry, lambda folder: _compute(model, source, transform, folder, batch_size, workers, progress))
    return _read(entry, source.classes)


def cache_key(model: VisionTransformer, source: Source, transform: Transform) -> str:
    config = asdict(transform.config)
    kept = ("image_size", "central_ratio", "antialias")  # all settings that evaluation uses
    seen = {"crop": transform.crop} | {name: config[name] for name in kept}
    said = [_VERSION, model_hash(model), source.fingerprint, seen]
    if (dtype := getattr(model, "computes_in", None)) is not None:
        said.append(str(dtype))
    return hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=16).hexdigest()


def model_hash(model: VisionTransformer) -> str:
    """Return a hash of the architecture and of every weight, so a model changed in memory is another model."""
    digest = hashlib.blake2b(json.dumps(model.config.to_dict(), sort_keys=True).encode(), digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _compute(
    model: VisionTransformer,
    source: Source,
    transform: Transform,
    folder: Path,
    batch_size: int,
    workers: int,
    progress: Progress | None,
) -> None:
    """Write the arrays batch by batch: the memory needed does not grow with the data."""
    assert not transform.train, "features are those of evaluation images"
    if not len(source):
        raise ValueError("the data is empty: it holds no images")
    rows = len(source)
    device = next(model.parameters()).device
    vectors: np.memmap | None = None
    labels, indices, done = [], [], 0
    with evaluating(model), torch.inference_mode():
        raw = device.type != "cpu"
        batches = batches_on_device(evaluation_batches(source, transform, batch_size, workers=workers, raw=raw), device)
        results = ((batch_features(model, b), b.labels, b.indices) for b in batches if len(b))
        for found, labels_B, indices_B in results_on_host(results):
            check_finite(found)
            if vectors is None:
                shape = (rows, found.shape[1])
                vectors = np.lib.format.open_memmap(folder / "features.npy", "w+", np.float32, shape)
            vectors[done : done + len(found)] = found.numpy()
            labels.append(labels_B.numpy())
            indices.append(indices_B.numpy())
            done += len(found)
            if progress is not None:
                progress(min(done, rows), rows)
    if vectors is None:
        raise ValueError("none of the images could be read")
    vectors.flush()
    np.save(folder / "labels.npy", np.concatenate(labels))
    np.save(folder / "indices.npy", np.concatenate(indices))
    write_json(folder / "facts.json", {"sha256": {name: sha256(folder / f"{name}.npy") for name in _ARRAYS}})


def batch_features(model: VisionTransformer, batch: Batch) -> torch.Tensor:
    """Return the vectors before the head, (B, D) float32, where the model is."""
    return model.forward_vector(batch.images).float()


def check_finite(vectors: torch.Tensor) -> None:
    if not vectors.isfinite().all():
        raise ValueError("the model's features are not finite numbers: its weights are damaged or training diverged")


def _read(folder: Path, classes: tuple[str, ...], *, mapped: bool = True) -> Features:
    vectors = np.load(folder / "features.npy", mmap_mode="r" if mapped else None, allow_pickle=False)
    labels, indices = (np.load(folder / f"{name}.npy", allow_pickle=False) for name in ("labels", "indices"))
    return Features(vectors[: len(labels)], labels, indices, tuple(classes))


def _whole(entry: Path) -> bool:
    try:
        facts = read_json(entry / "facts.json")
        return facts["sha256"] == {name: sha256(entry / f"{name}.npy") for name in _ARRAYS}
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _fill(entry: Path, write: Callable[[Path], None]) -> None:
    """Make the entry in a hidden folder and rename it. Of several processes that do so the last one stays."""
    try:
        with whole_folder(entry) as partial:
            write(partial)
    except OSError as error:
        raise ValueError(
            f"features cannot be kept in {entry.parent} ({error.strerror}); set SOFTMOE_CACHE to another folder"
        ) from error
