"""Read and write weights under the names and shapes of the paper's JAX code (google-research/vmoe).

    from_vmoe("weights.npz", model)        their arrays into our model, in place
    np.savez("weights.npz", **to_vmoe(model))

Names are joined by "/", as in `Encoder/encoderblock_0/SelfAttention/query/kernel`. A dict of arrays or an `.npz` is
read; the sharded msgpack files in which the first V-MoE models were released are not.

Each of the reference's arrays is a view of one of our parameters: transposed, split by heads, or a third of the packed
query-key-value matrix. Writing into the view writes the parameter, reading it reads it, and the same views of the
gradients are the reference's gradients. Nothing is computed, so both directions are exact.

Letters: D width, A heads, E head width.
"""

import math
import struct
import zlib
from collections.abc import Callable, Mapping
from os import PathLike
from tokenize import TokenError
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import numpy as np
import torch
from torch import Tensor, nn

from softmoe.models import VisionTransformer
from softmoe.models.embed import LearnedPositions
from softmoe.models.heads import AttentionPool
from softmoe.models.transformer import MLP, Attention, Block
from softmoe.moe import Experts, ExpertsBeside, MoE, PlacedRouter, SoftRouter, ToSlots
from softmoe.moe.sparse import SparseRouter
from softmoe.storage.files import first_line

PREFIX = "params/"
_SPARE_BYTES, _MAX_RATIO = 100_000_000, 20  # what an .npz may unpack to: so much, and so many times its size


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
        elif not is_bfloat16(source) and (source.dtype.kind not in "fiu" or source.dtype.itemsize > 8):
            faults.append(f"{name} has dtype {source.dtype}, expected numbers")
        elif not bool(as_tensor(source).isfinite().all()):
            faults.append(f"{name} is not finite")
    if faults:
        raise ValueError(f"{len(faults)} arrays do not fit the {type(module).__name__}: " + "; ".join(faults))
    for name, source in sources.items():
        targets[name].copy_(as_tensor(source))


def to_vmoe(module: nn.Module, *, grad: bool = False) -> dict[str, np.ndarray]:
    """Return name -> new array, the exact inverse of `from_vmoe`; with `grad` the gradients instead of the values.

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
    """Read the named arrays of an .npz file; ValueError for one that unpacks to many times its size.

    That is checked before anything is unpacked: weights hardly compress.
    """
    with open(path, "rb") as stream:
        if stream.read(6) == b"\x93NUMPY":
            raise ValueError(f"{path} holds one array, expected an .npz file of named arrays")
        size = stream.seek(0, 2)
        try:
            with ZipFile(stream) as archive:
                members = archive.infolist()
                if sum(member.file_size for member in members) > _SPARE_BYTES + _MAX_RATIO * size:
                    raise _Damaged(f"it unpacks to more than {_MAX_RATIO} times its {size} bytes")
                arrays = {member.filename.removesuffix(".npy"): read_array(archive, member) for member in members}
        except _Damaged as error:
            raise ValueError(f"{path} is not an .npz file of plain arrays: {error}") from error
        except (ArithmeticError, OSError, EOFError, IndexError, KeyError, MemoryError, TypeError) as error:
            raise ValueError(f"{path} is not a whole .npz file: its list of arrays is damaged") from error
        except (BadZipFile, ValueError, RuntimeError, SyntaxError, TokenError, zlib.error, struct.error) as error:
            raise ValueError(f"{path} is not a whole .npz file of plain arrays: {first_line(error)}") from error
    if len(arrays) < len(members):
        raise ValueError(f"{path} is not an .npz file of plain arrays: two of them have the same name")
    return arrays


class _Damaged(Exception):
    """A file that no .npz writer makes; the message says why."""


def read_array(archive: ZipFile, member: ZipInfo) -> np.ndarray:
    """Read one array, whose header must fit the bytes that follow: numpy itself would allocate whatever it says."""
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
    """Tell if the numbers are bfloat16: JAX's own dtype, and the two bytes left of it in a file, have kind "V"."""
    return array.dtype.kind == "V" and array.dtype.itemsize == 2 and array.dtype.fields is None


def as_tensor(array: np.ndarray) -> Tensor:
    own = np.array(array, order="C")  # torch takes neither read-only nor reversed arrays
    if is_bfloat16(own):
        return torch.from_numpy(own.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(own.astype(own.dtype.newbyteorder("="), copy=False))


def as_array(tensor: Tensor) -> np.ndarray:
    tensor = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    return np.array(tensor.cpu().numpy(), order="C")


Read = Callable[[Tensor], Tensor]  # a parameter -> its values or its gradient
Views = dict[str, Tensor]


def reference_views(module: nn.Module, read: Read) -> Views:
    """Return reference name -> view of a parameter of a VisionTransformer or MoE layer; `read` must not copy it."""
    if isinstance(module, VisionTransformer):
        views = vit_views(module, read)
    elif isinstance(module, MoE):
        views = moe_views(module, read)
    else:
        raise ValueError(f"expected a VisionTransformer or an MoE layer, got {type(module).__name__}")
    assert sum(view.numel() for view in views.values()) == sum(p.numel() for p in module.parameters())
    return views


def vit_views(model: VisionTransformer, read: Read) -> Views:
    c, conv = model.config, model.embed.proj
    if c.registers or c.layer_scale or c.pre_norm or c.pool_norm or c.last_map is not None or c.head_blocks:
        raise ValueError(
            "the paper's code has no registers, layer scales, merged tokens, slots that stay, norms before the blocks "
            "or after pooling, and no head on several blocks"
        )
    assert conv.bias is not None
    views = {"embedding/kernel": read(conv.weight).permute(2, 3, 1, 0), "embedding/bias": read(conv.bias)}
    if model.class_token is not None:
        views["cls"] = read(model.class_token)
    if isinstance(model.positions, LearnedPositions):
        views["Encoder/posembed_input/pos_embedding"] = read(model.positions.table)
    for index, block in enumerate(model.encoder.blocks):
        views |= nested(f"Encoder/encoderblock_{index}", block_views(block, read))
    assert isinstance(model.encoder.norm, nn.LayerNorm)
    views |= nested("Encoder/encoder_norm", norm_views(model.encoder.norm, read))
    if isinstance(model.pool, AttentionPool):
        views |= nested("MapHead", map_head_views(model.pool, read))
    for name in ("pre_logits", "head"):
        layer = getattr(model, name)
        if isinstance(layer, nn.Linear):
            views |= nested(name, linear_views(layer, read))
    return views


def block_views(block: nn.Module, read: Read) -> Views:
    assert isinstance(block, Block)
    assert isinstance(block.attention, Attention)
    views = nested("LayerNorm_0", norm_views(block.norm1, read))
    views |= nested("SelfAttention", attention_views(block.attention, read))
    views |= nested("LayerNorm_1", norm_views(block.norm2, read))
    if isinstance(block.mlp, MoE):
        return views | nested("Moe", moe_views(block.mlp, read))
    assert isinstance(block.mlp, MLP)
    return views | nested("Mlp", mlp_views(block.mlp, read))


def map_head_views(pool: AttentionPool, read: Read) -> Views:
    views = {"probe": read(pool.probe)}
    views |= nested("MultiHeadDotProductAttention", attention_views(pool.attention, read))
    views |= nested("LayerNorm", norm_views(pool.norm, read))
    return views | nested("Mlp", mlp_views(pool.mlp, read))


def attention_views(attention: Attention, read: Read) -> Views:
    """Split query, key and value, with the heads as an axis: kernels (D, A, E), biases (A, E), output (A, E, D)."""
    views: Views = {}
    heads = (attention.heads, -1)
    weights, biases = read(attention.qkv.weight).chunk(3), read(attention.qkv.bias).chunk(3)
    for name, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
        views[f"{name}/kernel"] = weight.T.unflatten(1, heads)
        views[f"{name}/bias"] = bias.unflatten(0, heads)
    views["out/kernel"] = read(attention.out.weight).T.unflatten(0, heads)
    views["out/bias"] = read(attention.out.bias)
    for name, norm in (("query_ln", attention.query_norm), ("key_ln", attention.key_norm)):
        if isinstance(norm, nn.LayerNorm):
            views |= nested(name, norm_views(norm, read))
    return views


def moe_views(layer: MoE, read: Read) -> Views:
    experts, router = layer.experts, layer.router
    if isinstance(layer, ToSlots):
        raise ValueError("the paper's code has no layer whose slots go on, so these weights cannot be written for it")
    if isinstance(layer, ExpertsBeside):
        raise ValueError("the paper's code has no experts beside an MLP, so these weights cannot be written for it")
    if not isinstance(experts, Experts):
        raise ValueError(f"expected an MoE layer with Experts inside, got {type(experts).__name__}")
    views = {
        "Mlp/Dense_0/kernel": read(experts.w1),
        "Mlp/Dense_0/bias": read(experts.b1),
        "Mlp/Dense_1/kernel": read(experts.w2).transpose(1, 2),
        "Mlp/Dense_1/bias": read(experts.b2),
    }
    if isinstance(router, PlacedRouter):
        raise ValueError("the paper's code has no router with a place, so these weights cannot be written for it")
    if isinstance(router, SoftRouter):
        views["Router/mu"] = read(router.phi)
        if router.scale is not None:
            views["Router/scale"] = read(router.scale)
    elif isinstance(router, SparseRouter):
        views["Router/dense/kernel"] = read(router.weight)
    return views


def mlp_views(mlp: MLP, read: Read) -> Views:
    return nested("Dense_0", linear_views(mlp.fc1, read)) | nested("Dense_1", linear_views(mlp.fc2, read))


def linear_views(linear: nn.Linear, read: Read) -> Views:
    return {"kernel": read(linear.weight).T, "bias": read(linear.bias)}


def norm_views(norm: nn.LayerNorm, read: Read) -> Views:
    views = {"scale": read(norm.weight)}
    return views if norm.bias is None else views | {"bias": read(norm.bias)}


def nested(parent: str, views: Views) -> Views:
    """Put `parent/` before every name."""
    return {f"{parent}/{name}": view for name, view in views.items()}
