"""Weights under the names and shapes of the paper's JAX code (google-research/vmoe).

    from_vmoe("weights.npz", model)        their arrays into our model, in place
    np.savez("weights.npz", **to_vmoe(model))

Names are joined by "/", as in `Encoder/encoderblock_0/SelfAttention/query/kernel`. A dict of arrays or an `.npz` is
read; the sharded msgpack files in which the first V-MoE models were released are not.
"""

import math
import struct
import zlib
from collections.abc import Mapping
from os import PathLike
from tokenize import TokenError
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import numpy as np
import torch
from torch import Tensor, nn

from softmoe.convert.views import reference_views

PREFIX = "params/"
_SPARE_BYTES, _RATIO = 100_000_000, 20


def from_vmoe(arrays: Mapping[str, Any] | str | PathLike[str], module: nn.Module) -> None:
    """Copy `arrays` (name -> array, or the path of an .npz) into `module`, a VisionTransformer or one MoE layer.

    Strict: every name of the module must be there in its shape, and no other. Otherwise one ValueError lists all
    that is wrong and nothing is copied. Values are converted to the dtype of the module. All names may start with
    "params/". bfloat16 arrays may be stored as such or, as .npz does it, as two anonymous bytes.
    """
    if isinstance(arrays, str | PathLike):
        arrays = read_npz(arrays)
    arrays = without_prefix(arrays)
    targets = reference_views(module, lambda parameter: parameter.detach())
    if any(target.is_meta for target in targets.values()):
        raise ValueError("the module has no storage to copy into (meta device): build it on a real device")
    sources = {name: np.asarray(arrays[name]) for name in targets if name in arrays}
    faults = [f"missing {name} {tuple(targets[name].shape)}" for name in targets if name not in arrays]
    faults += [f"unexpected {name} {np.shape(arrays[name])}" for name in arrays if name not in targets]
    for name, source in sources.items():
        if source.shape != targets[name].shape:
            faults.append(f"{name} has shape {source.shape}, expected {tuple(targets[name].shape)}")
        elif not is_bfloat16(source) and source.dtype.kind not in "fiu":
            faults.append(f"{name} has dtype {source.dtype}, expected numbers")
    if faults:
        raise ValueError(f"{len(faults)} arrays do not fit the {type(module).__name__}: " + "; ".join(faults))
    for name, source in sources.items():
        targets[name].copy_(as_tensor(source))


def to_vmoe(module: nn.Module, *, grad: bool = False) -> dict[str, np.ndarray]:
    """The exact inverse: name -> new array. With `grad`, the gradients under the same names instead of the values.

    numpy has no bfloat16: such parameters are returned as float32, which holds them exactly.
    """
    if grad:
        without = [name for name, parameter in module.named_parameters() if parameter.grad is None]
        if without:
            raise ValueError(f"parameters without a gradient, run backward first: {', '.join(without)}")
    views = reference_views(module, gradient if grad else lambda parameter: parameter.detach())
    return {name: as_array(view) for name, view in views.items()}


def gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def read_npz(path: str | PathLike[str]) -> dict[str, np.ndarray]:
    """The named arrays of an .npz file. What they take in memory is known from the headers before anything is
    unpacked, and may be `_SPARE_BYTES` and `_RATIO` times the file's size: weights hardly compress."""
    with open(path, "rb") as stream:
        if stream.read(6) == b"\x93NUMPY":
            raise ValueError(f"{path} holds one array, expected an .npz file of named arrays")
        size = stream.seek(0, 2)
        try:
            with ZipFile(stream) as archive:
                members = archive.infolist()
                if sum(member.file_size for member in members) > _SPARE_BYTES + _RATIO * size:
                    raise _Damaged(f"it unpacks to more than {_RATIO} times its {size} bytes")
                arrays = {member.filename.removesuffix(".npy"): read_array(archive, member) for member in members}
        except _Damaged as error:
            raise ValueError(f"{path} is not an .npz file of plain arrays: {error}") from error
        except (ArithmeticError, OSError, EOFError, IndexError, KeyError, MemoryError, TypeError) as error:
            raise ValueError(f"{path} is not a whole .npz file: its list of arrays is damaged") from error
        except (BadZipFile, ValueError, RuntimeError, SyntaxError, TokenError, zlib.error, struct.error) as error:
            said = (str(error).splitlines() or ["damaged"])[0].rstrip(".")
            raise ValueError(f"{path} is not a whole .npz file of plain arrays: {said}") from error
    if len(arrays) < len(members):
        raise ValueError(f"{path} is not an .npz file of plain arrays: two of them have the same name")
    return arrays


class _Damaged(Exception):
    """A reason in our own words."""


def read_array(archive: ZipFile, member: ZipInfo) -> np.ndarray:
    """One array. Its header must fit the bytes that follow: numpy would allocate whatever it says, and allows
    pickles on demand."""
    if member.compress_type not in (ZIP_STORED, ZIP_DEFLATED) or member.flag_bits & 1:
        raise _Damaged(f"{member.filename!r} is compressed or encrypted as numpy never does it")
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise _Damaged(f"{member.filename!r} is of version {version}")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
        if dtype.hasobject or dtype.subdtype is not None:
            raise _Damaged(f"{member.filename!r} holds Python objects, which are never read")
        data = file.read()
    if min(shape, default=0) < 0 or len(data) != math.prod(shape) * dtype.itemsize:
        raise _Damaged(f"{member.filename!r} has {len(data)} bytes, which do not fit its shape {shape}")
    return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")


def without_prefix(arrays: Mapping[str, Any]) -> Mapping[str, Any]:
    if not arrays or not all(name.startswith(PREFIX) for name in arrays):
        return arrays
    return {name.removeprefix(PREFIX): array for name, array in arrays.items()}


def is_bfloat16(array: np.ndarray) -> bool:
    """Both the dtype that JAX adds to numpy and the two bytes that are left of it in a file have kind "V"."""
    return array.dtype.kind == "V" and array.dtype.itemsize == 2 and array.dtype.fields is None


def as_tensor(array: np.ndarray) -> Tensor:
    own = np.array(array, order="C")  # torch takes neither read-only nor reversed arrays
    if is_bfloat16(own):
        return torch.from_numpy(own.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(own.astype(own.dtype.newbyteorder("="), copy=False))


def as_array(tensor: Tensor) -> np.ndarray:
    tensor = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    return np.array(tensor.cpu().numpy(), order="C")
