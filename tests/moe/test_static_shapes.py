"""Soft MoE has no data-dependent shape: compilers, exporters and function transforms take the layer as it is."""

import shutil

import pytest
import torch
from torch.func import functional_call, grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

from softmoe import SoftMoE
from softmoe.moe import (
    Experts,
    ExpertsChoiceRouter,
    IdentityRouter,
    MoE,
    PlacedRouter,
    SoftUniformRouter,
    TokensChoiceRouter,
    UniformRouter,
    UniformSoftRouter,
)

DENSE = {
    "soft": lambda: SoftMoE(8, 4, 2),
    "soft_uniform": lambda: MoE(SoftUniformRouter(8, 4, 2), Experts(8, 32, 4)),
    "uniform_soft": lambda: MoE(UniformSoftRouter(8, 4, 2), Experts(8, 32, 4)),
    "uniform": lambda: MoE(UniformRouter(8, 4, 2), Experts(8, 32, 4)),
}
OTHERS = {
    "placed": lambda: MoE(PlacedRouter(8, 4, 2), Experts(8, 32, 4)),
    "tokens_choice": lambda: MoE(TokensChoiceRouter(8, 4, top_k=2, noise_std=0.0), Experts(8, 32, 4)),
    "experts_choice": lambda: MoE(ExpertsChoiceRouter(8, 4, noise_std=0.0), Experts(8, 32, 4)),
    "identity": lambda: MoE(IdentityRouter(8, 3), Experts(8, 32, 3)),
}


@pytest.mark.parametrize("name", [*DENSE, *OTHERS])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, of dynamo
def test_compiles_without_a_graph_break(name, masked):
    """torch.compile(fullgraph=True) gives eager's output and gradients, for every router."""
    torch.compiler.reset()
    layer = (DENSE | OTHERS)[name]().double()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    mask = torch.rand(2, 6) < 0.7 if masked else None
    x = torch.randn(2, 6, 8, dtype=torch.float64, requires_grad=True)
    inputs = (x, *layer.parameters())
    expected, found = layer(x, mask), compiled(x, mask)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(
        torch.autograd.grad(found.square().sum(), inputs, materialize_grads=True),  # centers need a grid of patches
        torch.autograd.grad(expected.square().sum(), inputs, materialize_grads=True),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the code generator needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # torch's own
def test_compiles_to_machine_code(monkeypatch, tmp_path):
    """Once through the real code generator (without vector instructions, which take it much longer)."""
    torch.compiler.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    layer = SoftMoE(16, 4, 2).eval()
    options = {"cpp_cache_precompile_headers": False, "cpp.simdlen": 0, "compile_threads": 1}
    compiled = torch.compile(layer, fullgraph=True, options=options)
    x = torch.randn(2, 6, 16)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x))


def test_exports_with_dynamic_batch_and_tokens():
    """One exported program serves any batch and any number of tokens, with and without padding."""
    layer = SoftMoE(8, 4, 2).eval()
    batch, tokens = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("tokens", min=1, max=512)
    example = (torch.randn(2, 6, 8), torch.ones(2, 6, dtype=torch.bool))
    shapes = ({0: batch, 1: tokens}, {0: batch, 1: tokens})
    program = torch.export.export(layer, example, dynamic_shapes=shapes).module()
    for B, M in ((2, 6), (5, 3), (64, 49)):
        x, mask = torch.randn(B, M, 8), torch.rand(B, M) < 0.7
        torch.testing.assert_close(program(x, mask), layer(x, mask))


@pytest.mark.parametrize(
    "router", [TokensChoiceRouter(8, 4, top_k=2), ExpertsChoiceRouter(8, 4), None], ids=["tokens", "experts", "soft"]
)
def test_checkpointing_gives_equal_gradients(router):
    """Computed again in the backward pass, the layer takes the same route, noise included: equal to the bit."""
    layer = (SoftMoE(8, 4, noise_std=1.0) if router is None else MoE(router, Experts(8, 32, 4, dropout=0.1))).train()
    x = torch.randn(2, 6, 8, requires_grad=True)
    inputs = (x, *layer.parameters())
    torch.manual_seed(1)
    expected = torch.autograd.grad(layer(x).square().sum(), inputs)
    torch.manual_seed(1)
    again = checkpoint(layer, x, use_reentrant=False)
    for ours, theirs in zip(torch.autograd.grad(again.square().sum(), inputs), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_vmap_over_batches():
    """Mapping over an extra axis equals a loop over it."""
    layer = SoftMoE(8, 4, 2).double()
    x = torch.randn(3, 2, 6, 8, dtype=torch.float64)
    torch.testing.assert_close(vmap(layer)(x), torch.stack([layer(batch) for batch in x]))


def test_vmap_over_models():
    """An ensemble of layers runs as one: functional_call under vmap over stacked parameters."""
    layers = [SoftMoE(8, 4, 2).double() for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(layers)
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    together = vmap(lambda p, b: functional_call(layers[0], (p, b), (x,)))(parameters, buffers)
    torch.testing.assert_close(together, torch.stack([layer(x) for layer in layers]))


def test_per_example_gradients():
    """vmap of grad: the gradient of each image alone."""
    layer = SoftMoE(8, 4, 2).double()
    parameters = dict(layer.named_parameters())

    def loss(p, image):
        return functional_call(layer, p, (image[None],)).square().sum()

    x = torch.randn(3, 6, 8, dtype=torch.float64)
    per_image = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for index, image in enumerate(x):
        alone = grad(loss)(parameters, image)
        for name in parameters:
            torch.testing.assert_close(per_image[name][index], alone[name])


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own, in jvp
def test_forward_mode():
    """jvp equals a central difference, for inputs with a zero token too."""
    layer = SoftMoE(8, 4, 2).double().requires_grad_(False)
    x, direction = torch.randn(2, 2, 6, 8, dtype=torch.float64)
    x[0, 0] = 0.0
    _, derivative = jvp(layer, (x,), (direction,))
    step = 1e-6
    difference = (layer(x + step * direction) - layer(x - step * direction)) / (2 * step)
    torch.testing.assert_close(derivative, difference, rtol=1e-4, atol=1e-5)
