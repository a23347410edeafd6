"""What `accelerate.apply` does to a model, and that nobody who holds the model is hurt."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import softmoe
from softmoe import accelerate
from softmoe.accelerate import buffers, experts, guards, linear
from softmoe.accelerate.techniques import technique_names
from softmoe.models import MoEConfig, VisionTransformer, ViTConfig

TRITON = ["triton_adamw", "triton_experts", "triton_soft"]
NAMES = ["activation", "attention", "buffers", "experts", "frame", "linear", "muon", "optimizer", "pages", *TRITON]
needs_all = pytest.mark.skipif(not experts.KERNEL.available, reason=f"not compiled: {experts.KERNEL.why_not()}")


@pytest.fixture(autouse=True)
def _small_tensors_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "LARGE", 0)
    monkeypatch.setattr(experts, "LARGE", 0)
    monkeypatch.setattr(linear, "LARGE", 0)


def small(**options) -> VisionTransformer:
    torch.manual_seed(0)
    moe = MoEConfig.of(num_experts=3, **options)
    model = VisionTransformer(
        ViTConfig(image_size=8, patch_size=4, width=32, depth=2, mlp_dim=32, heads=2, num_classes=3, moe=moe)
    )
    nn.init.normal_(model.head.weight)  # pyright: ignore[reportOptionalMemberAccess]
    return model


def outputs_and_gradients(model: nn.Module) -> list[Tensor]:
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    y = model(x)
    return [y, *torch.autograd.grad(y.pow(3).sum(), list(model.parameters()))]


def check(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * max(1.0, other.abs().max().item()))


@needs_all
def test_the_report_names_every_technique() -> None:
    """On, or off and why; one line, and a dictionary for the run's folder."""
    model = small()
    report = accelerate.apply(model, torch.optim.SGD(model.parameters()))
    assert [t.name for t in report.techniques] == technique_names() == NAMES
    assert set(report.on()) >= {"activation", "attention", "buffers", "experts"}
    assert report.to_dict()["optimizer"] == "off: no optimizer with moments in bfloat16"
    assert str(report).startswith("accelerate: activation, attention, buffers, experts")
    assert "\n" not in str(report)
    assert report.summary().startswith("faster code for this device is on for: activation, attention, buffers, experts")
    alone = accelerate.apply(nn.Linear(2, 2)).to_dict()
    assert alone["experts"] == "off: no experts in this model"
    assert alone["buffers"] == "off: no optimizer was given"


def test_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """SOFTMOE_ACCELERATE=off leaves the model and its optimizer as they were."""
    monkeypatch.setenv("SOFTMOE_ACCELERATE", "off")
    model = small()
    kinds = [type(module) for module in model.modules()]
    optimizer = torch.optim.SGD(model.parameters())
    report = accelerate.apply(model, optimizer)
    assert report.on() == []
    assert str(report) == "accelerate: all off by SOFTMOE_ACCELERATE"
    assert report.summary().startswith("plain torch: ")
    assert [type(module) for module in model.modules()] == kinds
    assert buffers.GradientBuffers.of(optimizer) is None


@needs_all
@pytest.mark.parametrize("stay", [False, True])
def test_a_model_computes_the_same(stay: bool) -> None:
    """Outputs and all gradients of a whole model, before, with and after it; applying twice is once."""
    model = small(slots_stay=True, blocks=(0, 1)) if stay else small()
    plain = outputs_and_gradients(model)
    accelerate.apply(model)
    assert sum(guards.plain_class(m) is not type(m) for m in model.modules()) >= 5
    kinds = [type(module) for module in model.modules()]
    accelerate.apply(model)
    assert [type(module) for module in model.modules()] == kinds
    check(outputs_and_gradients(model), plain)
    accelerate.remove(model)
    assert all(torch.equal(a, b) for a, b in zip(outputs_and_gradients(model), plain, strict=True))


@needs_all
def test_whoever_holds_the_model_still_does() -> None:
    """Parameters, names, hooks and modules are the same objects; copies, states and pickles work."""
    model, heard = small(), []
    modules, parameters, state = list(model.modules()), list(model.parameters()), model.state_dict()
    for module in modules:
        module.register_forward_hook(lambda module, *_: heard.append(module))
    plain = outputs_and_gradients(model)
    called = [*heard]
    heard.clear()
    accelerate.apply(model)
    check(outputs_and_gradients(model), plain)
    assert [id(module) for module in heard] == [id(module) for module in called]
    assert all(a is b for a, b in zip(modules, model.modules(), strict=True))
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert model.state_dict().keys() == state.keys()
    bare = small()
    bare.load_state_dict(model.state_dict())
    for copied in (copy.deepcopy(bare), bare):
        accelerate.apply(copied)
        check(outputs_and_gradients(copy.deepcopy(copied)), plain)


@needs_all
def test_compiled_for_images_of_any_size() -> None:
    """Compiled once with sizes as symbols, the accelerated model has the plain one's outputs at each size."""
    torch.compiler.reset()
    model = small()
    sizes = [torch.randn(2, 3, side, side) for side in (8, 12, 20)]
    plain = [model(images) for images in sizes]
    accelerate.apply(model)
    compiled = torch.compile(model, backend="aot_eager", dynamic=True, fullgraph=True)
    for images, wanted in zip(sizes, plain, strict=True):
        check([compiled(images)], [wanted])


@needs_all
@pytest.mark.parametrize("how", ["checkpointing", "compile", "export", "functional"])
def test_what_wraps_the_model(how: str) -> None:
    """Checkpointed blocks, torch.compile, torch.export and functional_call give the same numbers."""
    model = small()
    plain = outputs_and_gradients(model)
    accelerate.apply(model)
    if how == "checkpointing":
        model.set_grad_checkpointing(True)
        check(outputs_and_gradients(model), plain)
    elif how == "compile":
        compiled = torch.compile(model, backend="aot_eager")
        y = compiled(torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)))
        check([y, *torch.autograd.grad(y.pow(3).sum(), list(model.parameters()))], plain)
    elif how == "export":
        images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
        program = torch.export.export(model, (images,))
        check([program.module()(images)], plain[:1])
        assert "softmoe" not in str(program.graph), "a file that is exported runs without this package"
    else:
        images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
        check([torch.func.functional_call(model, dict(model.named_parameters()), (images,))], plain[:1])


@needs_all
def test_a_layer_in_anyones_model() -> None:
    """A SoftMoE inside a module of somebody else's, in training and in evaluation."""
    torch.manual_seed(0)
    mine = nn.Sequential(nn.Linear(16, 32), softmoe.SoftMoE(32, 4, 2), nn.GELU(approximate="tanh"))
    x = torch.randn(3, 5, 16)
    with torch.inference_mode():
        plain = mine(x)
    accelerate.apply(mine)
    assert type(mine[1].experts) is experts.CompiledExperts  # pyright: ignore[reportAttributeAccessIssue]
    with torch.inference_mode():
        torch.testing.assert_close(mine(x), plain, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("gone", NAMES)
def test_a_technique_can_be_taken_away(gone: str) -> None:
    """Without its file the others work, and a model computes the same."""
    code = f"""
import sys
import softmoe.accelerate
from softmoe.accelerate import techniques
sys.modules["softmoe.accelerate.{gone}"] = None  # as if the file were not there
names = techniques.technique_names
techniques.technique_names = lambda: [name for name in {NAMES} if name != "{gone}"]
import torch, softmoe
layer = softmoe.SoftMoE(16, 2)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
print(softmoe.accelerate.apply(layer, optimizer))
optimizer.zero_grad()
layer(torch.randn(2, 3, 16)).sum().backward()
optimizer.step()
"""
    environment = os.environ | {"PYTHONPATH": str(Path(softmoe.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("accelerate: ")


def test_the_builder_loads_nothing_else() -> None:
    """The data room uses it: no model, no technique comes with it."""
    code = "import sys, softmoe.accelerate.build; print([n for n in sys.modules if n.startswith('softmoe.')])"
    environment = os.environ | {"PYTHONPATH": str(Path(softmoe.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    loaded = set(eval(done.stdout))
    needed = ("lazy", "machine", "paths", "accelerate", "accelerate.build", "storage", "storage.files")
    assert loaded <= {f"softmoe.{name}" for name in needed}
