"""Turn a trained model into a faster one for inference only.

Soft routers are replaced by ones with normalized slot vectors, experts by packed ones, dropout by nothing; the rest is
copied and gets the accelerations of this processor. The experts of every MoE layer are compared with the original's on
random rows, so that a layer that would be wrong is refused when the model is prepared.

A model larger than the memory stays in its file. The weights of a loaded model are mapped from the file: pages are read
when a product first touches them, and the system may drop them at any time, since they are never written to. It need
not guess which: the pages of each block are released as soon as the block is done. So a run holds at most one block of
the weights besides some activations, and is as fast as the disk (or as the file cache, if the file fits).
"""

import copy
import ctypes
import mmap
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from softmoe import accelerate
from softmoe.accelerate.guards import is_exactly, plain_class
from softmoe.inference.layers import KERNEL, WEIGHTS, ByteDense, PreparedExperts, PreparedSoftRouter, Weights
from softmoe.models import VisionTransformer
from softmoe.models.transformer import MLP, Attention, Block
from softmoe.moe import Experts, ExpertsBeside, MoE, Router, SoftRouter
from softmoe.storage import load_saved, open_saved

LARGEST_ERROR: dict[str, float] = {
    "float32": 1e-4,
    "float16": 1e-2,
    "bfloat16": 3e-2,
    "int8": 8e-2,
    "int8_dynamic": 8e-2,
}
"""The largest relative error (root mean square) of the experts' outputs that `prepare` accepts."""
Model = TypeVar("Model", bound=nn.Module)


def prepare(model: Model, weights: Weights = "float32", *, copy_weights: bool = True) -> Model:
    """Make a new module for inference only; the original is not changed and shares no memory with it.

    `model` is a ViT, one MoE layer, or any module that holds such layers, in evaluation mode and float32. `weights` is
    how experts are stored: float16 and bfloat16 take half, int8 a quarter of the memory (and of the time, if that goes
    into reading weights); int8_dynamic also rounds the inputs of experts and dense layers, and computes in bytes.
    `copy_weights=False` (float32 only) shares all weights with the original, for models larger than the memory.
    """
    if weights not in WEIGHTS:
        raise ValueError(f"weights must be one of {', '.join(WEIGHTS)}, got {weights!r}")
    if weights != "float32" and not copy_weights:
        raise ValueError(f"{weights} weights are always new ones: leave out copy_weights=False, or use float32")
    check(model, weights)
    memo: dict[int, object] = {}
    for path, module in model.named_modules():
        if is_exactly(module, SoftRouter):
            memo[id(module)] = _named(path, PreparedSoftRouter, module)
        elif is_exactly(module, Experts) and copy_weights and (weights != "float32" or _packs(module)):
            prepared = _named(path, PreparedExperts, module, weights)
            compare(path, module, prepared, weights)
            memo[id(module)] = prepared
        elif type(module) is Block and weights == "int8_dynamic":
            for name, linear in _dense(module):
                memo[id(linear)] = _named(f"{path}.{name}", ByteDense, linear)
        elif type(module) is nn.Dropout:
            memo[id(module)] = nn.Identity()
    if not copy_weights:
        memo |= {id(tensor): tensor for tensor in _tensors(model)}
    made = copy.deepcopy(model, memo)
    for module in made.modules():
        if isinstance(module, Experts):
            module.dropout = 0.0
    if not copy_weights:
        return made.eval()  # and nothing more: a model larger than the memory leaves no room for other buffers
    if all(tensor.device.type == "cpu" for tensor in _tensors(made)):
        accelerate.apply(made)  # what is left of torch's own: GELU, attention, linear layers
    return made.requires_grad_(False).eval()


def open_mapped(where: str | Path, *, verify: bool = False) -> VisionTransformer:
    """Load the model of a saved folder or a run, of any size, for inference on the CPU in float32.

    `verify=True` first reads the whole file to check its hash; names, shapes and types are checked in any case.
    """
    model = prepare(load_saved(open_saved(where), verify=verify), copy_weights=False)
    for block in model.encoder.blocks:
        block.register_forward_hook(_release_pages)
    return model


def check(model: nn.Module, weights: Weights) -> None:
    """Raise ValueError for a model that cannot be prepared: in training, quantized, of unknown parts, or not finite."""
    if model.training:
        raise ValueError("a model in training mode cannot be prepared: call model.eval() first")
    for tensor in _tensors(model):
        if tensor.is_meta:
            raise ValueError("a model on the meta device has no weights to prepare")
        if type(tensor).__module__.split(".")[0] != "torch":
            raise ValueError(f"a weight is a {type(tensor).__name__} already: prepare first, then let others quantize")
    for path, module in model.named_modules():
        where = path or "the module"
        if isinstance(module, MoE | Router | Experts):
            if not plain_class(module).__module__.startswith("softmoe.moe."):  # a subclass may compute something else
                raise ValueError(f"{where} is a {type(module).__name__}, which inference does not know how to prepare")
            if module._forward_hooks or module._forward_pre_hooks:
                raise ValueError(f"{where} has hooks, which a prepared model would not call; remove them first")
        if isinstance(module, MoE) and plain_class(module.experts) is not Experts:
            name = type(module.experts).__name__
            raise ValueError(f"{where} has experts of type {name}, which inference does not know how to prepare")
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            full = f"{path}.{name}" if path else name
            if tensor.is_floating_point() and tensor.dtype != torch.float32:
                raise ValueError(
                    f"{full} is {tensor.dtype}; a model is prepared from float32: call model.float() first"
                )
            if not isinstance(module, Experts) and not tensor.isfinite().all():
                raise ValueError(f"{full} has values that are not finite numbers: training diverged, or it is damaged")
    if weights != "float32" and not any(isinstance(module, Experts) for module in model.modules()):
        raise ValueError(f"this model has no experts, so none can be stored in {weights}; use float32")


def compare(path: str, plain: Experts, prepared: nn.Module, weights: Weights) -> None:
    """Raise ValueError for experts that differ too much from the plain ones on random rows, two for each expert."""
    N, D = plain.num_experts, plain.dim
    rows_NSD = torch.randn(N, 2, D, generator=torch.Generator().manual_seed(0), device="cpu").to(plain.b1.device)
    with torch.inference_mode():
        right_NSD, ours_NSD = plain(rows_NSD), prepared(rows_NSD)
        error_N = (ours_NSD - right_NSD).square().mean((1, 2)).sqrt()
        size_N = right_NSD.square().mean((1, 2)).sqrt()
    relative_N = torch.where(error_N > 0, error_N / size_N, 0.0)
    worst = int(relative_N.argmax())
    if not float(relative_N[worst]) <= LARGEST_ERROR[weights]:
        raise ValueError(
            f"{weights} weights would change the outputs of expert {worst} in {path or 'the experts'} by "
            f"{float(relative_N[worst]):.1%}; use more bits"
        )


def _dense(block: Block) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers of a block's attention and MLP, as far as these are our own classes."""
    if is_exactly(block.attention, Attention):
        yield from (("attention.qkv", block.attention.qkv), ("attention.out", block.attention.out))
    name, mlp = ("mlp.mlp", block.mlp.mlp) if isinstance(block.mlp, ExpertsBeside) else ("mlp", block.mlp)
    if type(mlp) is MLP:
        yield from ((f"{name}.fc1", mlp.fc1), (f"{name}.fc2", mlp.fc2))


def _packs(experts: Experts) -> bool:
    """Tell if the compiled kernel is there, the only reason to store float32 weights in another layout."""
    return experts.w1.device.type == "cpu" and KERNEL.available


def _named(path: str, make: Callable[..., nn.Module], module: nn.Module, *arguments: object) -> nn.Module:
    try:
        return make(module, *arguments)
    except ValueError as error:
        raise ValueError(f"{path or 'the module'} cannot be prepared: {error}") from error


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _release_pages(module: nn.Module, _inputs: Any, _output: Any) -> None:
    """Release the pages of a module's weights that are mapped from a file."""
    if not sys.platform.startswith("linux"):
        return  # elsewhere the system drops pages on its own when it needs them
    files = list(_mapped_files())
    for tensor in module.parameters():
        for start, end in files:
            if start <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= end:
                _drop(tensor)


def _drop(tensor: Tensor) -> None:
    """Release whole pages only: the first and the last may hold numbers of other tensors."""
    page = mmap.PAGESIZE
    start = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + tensor.nbytes) // page * page
    if end > start:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def _mapped_files() -> Iterator[tuple[int, int]]:
    """Yield the addresses of mapped weight files: releasing any other memory would lose its contents."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].endswith(".safetensors"):
            start, end = fields[0].split("-")
            yield int(start, 16), int(end, 16)
