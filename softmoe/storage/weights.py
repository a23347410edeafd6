"""Write and read weight files one tensor at a time: safetensors, in one piece or in shards.

Writing streams: a tensor is fetched, written and hashed, then let go, so saving a model costs no second copy of it.
Reading maps the files into memory: nothing is copied until it is used. Nothing here can read a pickle.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from softmoe.storage.files import FileFacts, first_line, parse_json, sha256, write_json
from softmoe.storage.settings import check_keys

SHARD_BYTES = 4 * 10**9
HEADER_BYTES = 16_000_000
"""The largest header of a safetensors file that is read; it takes ten times as much memory. Models have some 100 KB."""
ALIGNMENT = 64
"""In bytes. Matrix products at other addresses are slower and differ in their last bits from those before saving. So
files begin with the tensors that fill whole multiples; the few others (scalars, small biases) are copied on loading."""
INDEX = "model.safetensors.index.json"
FILE_NAME = re.compile(r"(model|ema)(-\d{5}-of-\d{5})?\.safetensors")
_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")  # torch.save's zip, and plain pickles


@dataclass(frozen=True)
class Spec:
    """The type and the shape of a tensor, known before its values are."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "Spec":
        return cls(tensor.dtype, tuple(tensor.shape))

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def write_weights(
    folder: Path,
    specs: Mapping[str, Spec],
    get: Callable[[str], Tensor],
    *,
    metadata: Mapping[str, str],
    max_shard_bytes: int = SHARD_BYTES,
) -> dict[str, FileFacts]:
    """Write `get(name)` for every name into one file, or into shards with an index if that would be too large."""
    shards = plan_shards(specs, max_shard_bytes)
    if len(shards) == 1:
        files = {"model.safetensors": shards[0]}
    else:
        files = {f"model-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, 1)}
    facts = {
        file: _write_file(folder / file, {n: specs[n] for n in names}, get, metadata) for file, names in files.items()
    }
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(spec.bytes for spec in specs.values())},
            "weight_map": {name: file for file, names in files.items() for name in names},
        }
        write_json(folder / INDEX, index)
    return facts


def plan_shards(specs: Mapping[str, Spec], max_bytes: int) -> list[list[str]]:
    """Divide the names, in order, into shards that fit. A tensor that is too large by itself gets its own shard."""
    if max_bytes < 1:
        raise ValueError(f"max_shard_bytes must be at least 1, got {max_bytes}")
    shards: list[list[str]] = [[]]
    size = 0
    for name, spec in specs.items():
        if shards[-1] and size + spec.bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += spec.bytes
    return shards


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileFacts:
    """Write one safetensors file of tensors in memory."""
    return _write_file(path, {name: Spec.of(tensor) for name, tensor in tensors.items()}, tensors.__getitem__, {})


def _write_file(
    path: Path, specs: Mapping[str, Spec], get: Callable[[str], Tensor], metadata: Mapping[str, str]
) -> FileFacts:
    names = sorted(specs, key=lambda name: (specs[name].bytes % ALIGNMENT > 0, -specs[name].dtype.itemsize))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        start, end = end, end + specs[name].bytes
        code, shape = _CODES[specs[name].dtype], list(specs[name].shape)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    digest = hashlib.sha256()
    with path.open("wb") as file:

        def put(data: Any) -> None:
            file.write(data)
            digest.update(data)

        put(len(text).to_bytes(8, "little"))
        put(text)
        for name in names:
            tensor = get(name).detach().to("cpu").contiguous()
            assert Spec.of(tensor) == specs[name], name
            put(tensor.reshape(-1).view(torch.uint8).numpy())
        return FileFacts(file.tell(), digest.hexdigest())


def check_same(found: Mapping[str, Spec], expected: Mapping[str, Spec], where: str) -> None:
    """Raise a ValueError that names the first difference unless names, shapes and types are the same."""
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


def check_finite(name: str, tensor: Tensor, where: Any) -> None:
    """Raise a ValueError if the tensor holds NaN or infinity.

    That takes one pass and no copy: a finite sum has finite terms, and only another sum needs a second pass.
    """
    wide = torch.float32 if tensor.dtype.itemsize < 4 else tensor.dtype
    if not bool(tensor.sum(dtype=wide).isfinite()) and not bool(tensor.isfinite().all()):
        raise ValueError(f"{where}: {name} holds numbers that are not finite (NaN or infinity)")


def check_files(folder: Path, files: Mapping[str, FileFacts], *, hashes: bool) -> None:
    """Raise a ValueError unless every file is there, no pickle, and has its size (and, if asked, its checksum)."""
    for name, facts in files.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"the weight file {name} is missing from {folder}; copy or download the model again")
        refuse_pickle(path)
        size = path.stat().st_size
        if size != facts.bytes:
            raise ValueError(
                f"{path} has {size} bytes instead of {facts.bytes}: it was cut or replaced; "
                "copy or download the model again"
            )
    if hashes:
        for name, facts in files.items():
            if sha256(folder / name) != facts.sha256:
                raise ValueError(
                    f"{folder / name} does not have the SHA-256 that its config.json states: the file was changed, "
                    "or the config.json is another model's"
                )


def parse_files(values: Mapping[str, Mapping[str, Any]]) -> dict[str, FileFacts]:
    """Read names, sizes and checksums of weight files from config.json's table of them."""
    if not values:
        raise ValueError("no weight file is named")
    for name, facts in values.items():
        if not FILE_NAME.fullmatch(name):  # also keeps us inside the folder
            raise ValueError(f"{name!r} is not the name of a weight file")
        check_keys(facts, ("bytes", "sha256"), f"weights.files.{name}.")
        if type(facts.get("bytes")) is not int or not isinstance(facts.get("sha256"), str):
            raise ValueError(f"size and SHA-256 of {name} are not stated")
    return {name: FileFacts(facts["bytes"], facts["sha256"]) for name, facts in values.items()}


def parse_dtypes(values: Mapping[str, int] | None) -> dict[str, int] | None:
    """Read the number of tensors of each type from config.json's table; None where it was not noted."""
    if values is None:
        return None
    check_keys(values, values, "weights.dtypes.")
    if not all(type(count) is int for count in values.values()):
        raise ValueError("weights.dtypes must give the number of tensors of each type")
    return dict(values)


def count_dtypes(specs: Iterable[Spec]) -> dict[str, int]:
    """Count the tensors of each type: {"float32": 150}."""
    return dict(Counter(str(spec.dtype).removeprefix("torch.") for spec in specs))


def refuse_pickle(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(9)
    if start.startswith(_PICKLES) and start[8:] != b"{":  # safetensors: eight bytes of length, then JSON
        raise ValueError(
            f"{path} is a pickle (made by torch.save?) and not a safetensors file; "
            "pickles can run any code when they are read, so it was not opened"
        )


def check_header(path: Path) -> None:
    """Raise OSError for a file that cannot be safetensors: a pipe, which would block, or a header without bounds.

    ValueError for a header that names a tensor twice, of which safetensors would take the last without a word.
    """
    if not path.is_file():
        raise OSError("it is not a plain file")
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = file.read(min(size, HEADER_BYTES)).decode(errors="replace")
    if size > HEADER_BYTES:
        raise OSError(f"its header has {size:,} bytes, {HEADER_BYTES:,} are the limit")
    parse_json(header, Path("its header"))


class WeightFiles:
    """The tensors of weight files by name, mapped into memory; they stay valid after the files are closed."""

    def __init__(self, folder: Path, files: Iterable[str]):
        self._stack = ExitStack()
        self._handle_of: dict[str, Any] = {}
        self.file_of: dict[str, str] = {}
        self.metadata: dict[str, str] = {}
        for file in files:
            try:
                check_header(folder / file)
                handle = self._stack.enter_context(safe_open(folder / file, framework="pt", device="cpu"))
                names, metadata = handle.keys(), handle.metadata()
            except (SafetensorError, OSError, ValueError) as error:
                self._stack.close()
                raise ValueError(f"{folder / file} is not a readable safetensors file: {first_line(error)}") from error
            for name in names:
                if name in self._handle_of:
                    self._stack.close()
                    raise ValueError(f"the tensor {name} is in two files of {folder}: {self.file_of[name]} and {file}")
                self._handle_of[name], self.file_of[name] = handle, file
            self.metadata |= metadata or {}

    def __enter__(self) -> "WeightFiles":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def names(self) -> list[str]:
        return list(self._handle_of)

    def spec(self, name: str) -> Spec:
        """Read type and shape from the header alone."""
        piece = self._handle_of[name].get_slice(name)
        code = piece.get_dtype()
        if code not in _DTYPES:
            raise ValueError(f"the tensor {name} has the type {code}, which softmoe does not read")
        return Spec(_DTYPES[code], tuple(piece.get_shape()))

    def tensor(self, name: str) -> Tensor:
        """Return a view of the mapped file, or a copy if its address is not aligned."""
        tensor = self._handle_of[name].get_tensor(name)
        return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor
