"""Sharded tensors on disk, by torch.distributed.checkpoint: every rank writes and reads its own parts.

A set of tensors is a folder of safetensors files, one per rank, each with the place of its parts in the whole; nothing
is pickled. Read back on any mesh, or by one process without any; a single safetensors file is read the same way, so a
run may go from one process to many and back.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from softmoe.models import TwoTowerConfig, ViTConfig
from softmoe.models.pretrained import SavedModel, save_tensors
from softmoe.models.weights import Spec


def write_parts(place: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Every rank of `group` writes its parts of `tensors` into the folder `place`."""
    writer = HuggingFaceStorageWriter(str(place), save_distributed=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(  # pyright: ignore[reportPrivateImportUsage]
            dict(tensors), storage_writer=writer, process_group=group, no_dist=not dist.is_initialized()
        )


def specs(place: Path) -> dict[str, Spec]:
    """Names, types and shapes of the tensors at `place`: a folder of parts, or one safetensors file."""
    metadata = _reader(place).read_metadata().state_dict_metadata
    return {
        name: Spec(entry.properties.dtype, tuple(entry.size))  # pyright: ignore[reportAttributeAccessIssue]
        for name, entry in metadata.items()
    }


def read_parts(place: Path, targets: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Fill `targets` in place, each rank its own parts.

    ValueError, before anything is changed, unless the names, shapes and types are exactly those at `place`.
    """
    check_same(specs(place), {name: Spec.of(tensor) for name, tensor in targets.items()}, str(place))
    _load(place, targets, group, alone=not dist.is_initialized())


def read_whole(place: Path, name: str, spec: Spec) -> Tensor:
    """One tensor, put together from its parts, in this process alone."""
    tensor = torch.empty(spec.shape, dtype=spec.dtype)
    _load(place, {name: tensor}, alone=True)
    return tensor


def read_all(place: Path) -> dict[str, Tensor]:
    tensors = {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in specs(place).items()}
    _load(place, tensors, alone=True)
    return tensors


def optimizer_targets(found: Mapping[str, Spec], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Empty state for `name/part` keys, to be filled by `read_parts`: spread like the parameter where it has its shape.

    ValueError for state of a parameter that is not there, or of another shape.
    """
    targets = {}
    for key, spec in found.items():
        name, _, part = key.rpartition("/")
        if name not in parameters:
            raise ValueError(f"the checkpoint has optimizer state of {name!r}, which this run does not train")
        parameter = parameters[name]
        if part == "step":
            targets[key] = torch.zeros(spec.shape, dtype=spec.dtype)
        elif spec.shape == tuple(parameter.shape):
            targets[key] = torch.zeros_like(parameter, dtype=spec.dtype, requires_grad=False)
        else:
            raise ValueError(f"{key} is {list(spec.shape)} in the checkpoint and {list(parameter.shape)} in this run")
    return targets


def export(place: Path, config: ViTConfig | TwoTowerConfig, folder: str | Path, **more: object) -> SavedModel:
    """Write the weights at `place` as a saved model: one process, one tensor in memory at a time.

    `more` are the options of `save_pretrained`: preprocessing, classes, provenance, max_shard_bytes.
    """
    found = specs(place)
    return save_tensors(
        config,
        found,
        lambda name: read_whole(place, name, found[name]),
        folder,
        **more,  # pyright: ignore[reportArgumentType]
    )


def check_same(found: Mapping[str, Spec], expected: Mapping[str, Spec], where: str) -> None:
    """One sentence that names what differs first."""
    for name in expected:
        if name not in found:
            raise ValueError(f"{where} is of another model: it has no {name}, which this one needs")
    for name, spec in found.items():
        if name not in expected:
            raise ValueError(f"{where} is of another model: it has {name}, which this one does not know")
        if spec != expected[name]:
            raise ValueError(
                f"{where} is of another model: {name} is {list(spec.shape)} {spec.dtype} there and "
                f"{list(expected[name].shape)} {expected[name].dtype} here"
            )


def _load(place: Path, targets: Mapping[str, Tensor], group: dist.ProcessGroup | None = None, *, alone: bool) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # alone is what is meant
        dcp.load(  # pyright: ignore[reportPrivateImportUsage]
            dict(targets), storage_reader=_reader(place), process_group=group, no_dist=alone
        )


class _OneFile(FileSystem):
    """A folder in which only one file is seen."""

    def __init__(self, file: Path):
        super().__init__()
        self.file = file

    def ls(self, path: object) -> list[str]:
        return [str(self.file)]


def _reader(place: Path) -> HuggingFaceStorageReader:
    if place.is_dir():
        return HuggingFaceStorageReader(str(place))
    if not place.is_file():
        raise ValueError(f"there are no tensors at {place}")
    reader = HuggingFaceStorageReader(str(place.parent))
    reader.fs = _OneFile(place)
    return reader
