"""A trained model -> a fast one that only infers.

What is replaced: Soft routers by ones with folded slot vectors, experts by packed ones, dropout by nothing. All else
is copied as it is. Every MoE layer's experts are tried on random rows against the original's, so that a layer that
would come out wrong is refused when the model is prepared and not noticed when it is used.
"""

import copy
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn

from softmoe.accelerate.guards import is_exactly, plain_class
from softmoe.inference import kernel
from softmoe.inference.dynamic import ByteDense
from softmoe.inference.experts import PreparedExperts
from softmoe.inference.packed import WEIGHTS, Weights
from softmoe.inference.routers import PreparedSoftRouter
from softmoe.models.transformer import MLP, Attention, Block
from softmoe.moe import (
    Experts,
    ExpertsChoiceRouter,
    IdentityRouter,
    MoE,
    Router,
    SoftMoE,
    SoftRouter,
    SoftUniformRouter,
    TokensChoiceRouter,
    UniformRouter,
    UniformSoftRouter,
)

LARGEST_ERROR: dict[str, float] = {
    "float32": 1e-4,
    "float16": 1e-2,
    "bfloat16": 3e-2,
    "int8": 8e-2,
    "int8_dynamic": 8e-2,
}
"""Root mean square of the change of the experts' outputs, over that of the outputs: beyond this, prepare refuses."""
Model = TypeVar("Model", bound=nn.Module)
_LAYERS = (MoE, SoftMoE)
_ROUTERS = (
    SoftRouter,
    TokensChoiceRouter,
    ExpertsChoiceRouter,
    IdentityRouter,
    UniformRouter,
    SoftUniformRouter,
    UniformSoftRouter,
)


def prepare(model: Model, weights: Weights = "float32", *, copy_weights: bool = True) -> Model:
    """A new module for inference only; the original is not touched and shares no memory with it.

    `model` is a ViT, one MoE layer, or any module that holds such layers, in evaluation mode and float32. `weights` is
    how experts are stored: float16 and bfloat16 in half, int8 in a quarter of the memory (and of the time, where that
    is spent on reading them); int8_dynamic also rounds what goes into experts and dense layers, and computes in
    bytes. `copy_weights=False` (float32 only) leaves all weights where they are: for models mapped
    from a file that is larger than the memory.
    """
    if weights not in WEIGHTS:
        raise ValueError(f"weights must be one of {', '.join(WEIGHTS)}, got {weights!r}")
    if weights != "float32" and not copy_weights:
        raise ValueError(f"{weights} weights are always new ones: leave out copy_weights=False, or use float32")
    check(model, weights)
    memo: dict[int, object] = {}
    for path, module in model.named_modules():
        if type(module) is SoftRouter:
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
    return made.requires_grad_(False).eval() if copy_weights else made.eval()


def check(model: nn.Module, weights: Weights) -> None:
    """ValueError unless every part that will be replaced, and every part around it, is one whose meaning is known."""
    if model.training:
        raise ValueError("a model in training mode cannot be prepared: call model.eval() first")
    if any(tensor.is_meta for tensor in _tensors(model)):
        raise ValueError("a model on the meta device has no weights to prepare")
    for path, module in model.named_modules():
        where = path or "the module"
        known = _LAYERS if isinstance(module, MoE) else _ROUTERS if isinstance(module, Router) else (Experts,)
        if isinstance(module, MoE | Router | Experts):
            if plain_class(module) not in known:
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
    """Both on the same random rows, two for each expert."""
    N, D = plain.num_experts, plain.dim
    rows_NSD = torch.randn(N, 2, D, generator=torch.Generator().manual_seed(0)).to(plain.b1.device)
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
    """The linears of a block whose inside is known."""
    if is_exactly(block.attention, Attention):
        yield from (("attention.qkv", block.attention.qkv), ("attention.out", block.attention.out))
    if type(block.mlp) is MLP:
        yield from (("mlp.fc1", block.mlp.fc1), ("mlp.fc2", block.mlp.fc2))


def _packs(experts: Experts) -> bool:
    """float32 weights are worth another layout only where the compiled product reads it."""
    return experts.w1.device.type == "cpu" and kernel.KERNEL.available


def _named(path: str, make: Callable[..., nn.Module], module: nn.Module, *arguments: object) -> nn.Module:
    try:
        return make(module, *arguments)
    except ValueError as error:
        raise ValueError(f"{path or 'the module'} cannot be prepared: {error}") from error


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
