"""Write and read tensors with many ranks, each its own parts, by torch.distributed.checkpoint.

A set of tensors is a folder of safetensors files, one per rank, each with the place of its parts in the whole; nothing
is pickled. It can be read on any mesh, or by one process; a single safetensors file is read the same way, so a run may
go from one process to many and back.

The ranks write into a hidden folder; when all of them are done, rank 0 writes the manifest and renames it. A rank that
dies before that leaves the last checkpoint as it was.
"""

import itertools
import shutil
import warnings
from collections.abc import Callable, Mapping
from functools import partial as partial_of
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from softmoe.machine import local
from softmoe.models import TwoTowerConfig, ViTConfig
from softmoe.storage.checkpoint import write_texts
from softmoe.storage.files import PARTIAL, FileFacts, empty_folder, first_line, put_in_place, sync_file
from softmoe.storage.pretrained import SavedModel, save_tensors
from softmoe.storage.weights import Spec, WeightFiles, check_finite

Value = TypeVar("Value")


def write_sharded(
    target: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    texts: Mapping[str, Any],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write the checkpoint `target`, called by all ranks of `group`. OSError on every rank if one of them fails.

    To write in the background, give tensors that training does not change, and a group of its own.
    """
    rank = dist.get_rank(group)
    partial = target.with_name(f"{PARTIAL}{target.name}")
    mine: dict[str, FileFacts] = {}

    def write(name: str) -> None:
        write_parts(partial / name, tensors[name], group)
        for path in sorted((partial / name).glob(f"shard-{rank + 1:05d}-*.safetensors")):
            sync_file(path)
            mine[f"{name}/{path.name}"] = FileFacts.of(path)

    def finish() -> None:
        write_texts(partial, step, texts, {name: facts for part in gathered for name, facts in part.items()})
        put_in_place(partial, target)

    try:
        on_all_ranks(partial_of(empty_folder, partial) if rank == 0 else None, group)
        for name in tensors:
            on_all_ranks(partial_of(write, name), group)
        gathered = gather(mine, group)
        on_all_ranks(finish if rank == 0 else None, group)
    except OSError:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def write_parts(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Write this rank's parts of `tensors` into the folder, together with all ranks of `group`."""
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(  # pyright: ignore[reportPrivateImportUsage]
            dict(tensors), storage_writer=writer, process_group=group, no_dist=not dist.is_initialized()
        )


def part_specs(place: Path) -> dict[str, Spec]:
    """Read names, types and shapes of the tensors at `place`: a folder of parts, or one safetensors file."""
    found: dict[str, Spec] = {}
    for name, entry in _reader(place).read_metadata().state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        found[name] = Spec(entry.properties.dtype, tuple(entry.size))
        check_cover(name, [(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks], found[name].shape, place)
    return found


Shape = tuple[int, ...]


def check_cover(name: str, parts: list[tuple[Shape, Shape]], shape: Shape, place: Path) -> None:
    """Raise a ValueError unless the parts (offset, size) fill the tensor: what no part holds would stay zero."""
    for start, size in parts:
        if any(s < 0 or n < 0 or s + n > full for s, n, full in zip(start, size, shape, strict=True)):
            raise ValueError(f"{place}: a part of {name} lies outside of its shape {list(shape)}")
    for (a, a_size), (b, b_size) in itertools.combinations(set(parts), 2):
        if all(x < y + m and y < x + n for x, n, y, m in zip(a, a_size, b, b_size, strict=True)):
            raise ValueError(f"{place}: two parts of {name} overlap")
    if sum(torch.Size(size).numel() for _, size in set(parts)) != torch.Size(shape).numel():
        raise ValueError(f"{place}: the parts of {name} do not make up its shape {list(shape)}")


def read_parts(
    place: Path, targets: Mapping[str, Tensor], group: dist.ProcessGroup | None = None, *, alone: bool = False
) -> None:
    """Fill `targets` in place, each rank its own parts; with `alone` this process reads without the other ranks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as asked for by `alone`
        dcp.load(  # pyright: ignore[reportPrivateImportUsage]
            dict(targets),
            storage_reader=_reader(place),
            process_group=group,
            no_dist=alone or not dist.is_initialized(),
        )
    for name, tensor in targets.items():
        check_finite(name, local(tensor), place)


def save_parts(place: Path, config: ViTConfig | TwoTowerConfig, folder: str | Path, **more: object) -> SavedModel:
    """Write the weights at `place` as a saved model: one process, one tensor in memory at a time.

    `more` are the options of `save_pretrained`: preprocessing, classes, provenance, max_shard_bytes.
    """
    parts = PartFiles(place)
    return save_tensors(config, parts.specs, parts.tensor, folder, **more)  # pyright: ignore[reportArgumentType]


class PartFiles(WeightFiles):
    """The tensors at `place`, a folder of parts or one file, by name; each is joined when it is read."""

    def __init__(self, place: Path):
        super().__init__(place.parent, ())
        self.place = place
        try:
            self.specs = part_specs(place)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, AssertionError) as error:
            raise ValueError(f"{place} cannot be read: {first_line(error)}") from error
        self.file_of = dict.fromkeys(self.specs, place.name)

    @property
    def names(self) -> list[str]:
        return list(self.specs)

    def spec(self, name: str) -> Spec:
        return self.specs[name]

    def tensor(self, name: str) -> Tensor:
        tensor = torch.empty(self.specs[name].shape, dtype=self.specs[name].dtype, device="cpu")
        read_parts(self.place, {name: tensor}, alone=True)
        return tensor


def shared_read(read: Callable[[int, int], Value], group: dist.ProcessGroup | None, kind: type[Exception]) -> Value:
    """Call `read(rank, world)` on all ranks and return its result; if it fails on any rank, raise `kind` on all."""
    found: list[Value] = []
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    on_all_ranks(lambda: found.append(read(rank, world)), group, kind)
    return found[0]


def on_all_ranks(
    work: Callable[[], None] | None, group: dist.ProcessGroup | None, kind: type[Exception] = OSError
) -> None:
    """Do this rank's work, if any, and wait for the others; if it failed on any rank, raise `kind` on all."""
    error = None
    try:
        if work is not None:
            work()
    except (Exception, CheckpointException) as caught:  # the latter is no Exception
        error = error_line(caught)
    failed = {rank: text for rank, text in enumerate(gather(error, group)) if text}
    if failed:
        rank, text = next(iter(failed.items()))
        raise kind(f"rank {rank}: {text}")


def gather(value: Value, group: dist.ProcessGroup | None) -> list[Value]:
    """Return the values of all ranks, in their order."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def error_line(error: BaseException) -> str:
    """Return the first line of an error's text; for a failed distributed save, of its cause."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return first_line(error)


class _OneFile(FileSystem):
    """A file system that lists one file whatever folder is asked for."""

    def __init__(self, file: Path):
        super().__init__()
        self.file = file

    def ls(self, path: object) -> list[str]:
        return [str(self.file)]


def _reader(place: Path) -> HuggingFaceStorageReader:
    """Open a folder of parts, or one safetensors file."""
    if place.is_dir():
        return HuggingFaceStorageReader(str(place))
    if not place.is_file():
        raise ValueError(f"there are no tensors at {place}")
    reader = HuggingFaceStorageReader(str(place.parent))
    reader.fs = _OneFile(place)
    return reader
