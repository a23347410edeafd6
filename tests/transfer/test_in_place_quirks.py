"""Experts in models with quirks: half precision, odd layouts and signatures, wrappers, and mistakes."""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tower_parts import Box, Call, D, H, mlp, packed_attention, randomize
from towers import Timm

from softmoe.moe import MoE
from softmoe.moe.record import record
from softmoe.transfer.in_place import upcycle_

IMAGES = torch.randn(6, 3, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randn(5, 9, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
INITS = ("beside", "positions", "closest")


def around(module: nn.Module, call: Callable[[nn.Module, Tensor], Tensor] | None = None) -> nn.Module:
    """A model of tokens (B, M, D) with one attention, and a module called `mlp` in the way of `call`."""

    def forward(self: Call, x: Tensor) -> Tensor:
        mixed = x + self.attn(x)
        return mixed + (self.mlp(mixed) if call is None else call(self.mlp, mixed))

    return randomize(Call(forward, attn=packed_attention(), mlp=module))


def learns(model: nn.Module, inputs: Tensor) -> bool:
    model(inputs).square().sum().backward()
    found = [layer for layer in model.modules() if isinstance(layer, MoE)]
    return bool(found) and all(layer.experts.w2.grad.abs().sum() > 0 for layer in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("init", INITS)
def test_half_precision(dtype: torch.dtype, init: str):
    """A model of half precision keeps it, and its routers start as those of the same model in float32."""
    torch.manual_seed(0)
    half = Timm().to(dtype)
    full = copy.deepcopy(half).float()
    moved = []
    for model, kind in ((half, dtype), (full, torch.float32)):
        torch.manual_seed(1)
        moved.append(upcycle_(model, experts=9, init=init, blocks=[0], batches=IMAGES.to(kind)).moved)
    assert {parameter.dtype for parameter in half.parameters()} == {dtype}
    assert moved[0] == pytest.approx(moved[1], abs=0.05)
    ours, theirs = (model.blocks[0].mlp.layer.router.phi.float().flatten(1) for model in (half, full))
    assert (ours - theirs).norm() < 0.25 * theirs.norm()  # their tokens differ a little; fresh ones are 1.4 apart


def test_a_failure_leaves_the_model_as_it_was():
    """Whenever it fails, all modules are the old ones, in their own mode: here at the last block, or in the router."""
    model = Timm().train()
    model.blocks[1].mlp = mlp(act=torch.tanh).double()
    old = dict(model.named_modules())
    with pytest.raises(ValueError, match=r"blocks\.1\.mlp, a Call, is neither"):
        upcycle_(model, experts=2, init="copy")
    with pytest.raises(ValueError, match="give more images"):
        upcycle_(model, experts=100, batches=IMAGES[:1])
    assert dict(model.named_modules()) == old
    assert all(module.training for module in model.modules())
    split = nn.Sequential(split_block(adds=False), split_block(adds=False)).double()
    before = dict(split.named_modules())
    with pytest.raises(ValueError, match="give more images"):
        upcycle_(split, ["0", "1"], experts=100, batches=TOKENS[:1])
    assert dict(split.named_modules()) == before


def with_grid(self: Call, x: Tensor, rows: int, *, columns: int) -> Tensor:
    hidden = self.fc1(x).transpose(1, 2).unflatten(2, (rows, columns))
    return self.fc2(F.gelu(self.depthwise(hidden).flatten(2).transpose(1, 2)))


class WithArguments(Call):
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        return self.function(self, *inputs, **named)


def needs_grid(self: Call, x: Tensor) -> Tensor:
    B, rows, columns, width = x.shape
    return self.fc2(F.gelu(self.fc1(x.roll(1, dims=1))))


def linear_pair() -> dict[str, nn.Linear]:
    return {"fc1": nn.Linear(D, H), "fc2": nn.Linear(H, D)}


ODD = {
    "further arguments": (
        lambda: WithArguments(with_grid, **linear_pair(), depthwise=nn.Conv2d(H, H, 3, padding=1, groups=H)),
        lambda m, x: m(x, 3, columns=3),
    ),
    "a grid and nothing else": (
        lambda: Call(needs_grid, **linear_pair()),
        lambda m, x: m(x.unflatten(1, (3, 3))).flatten(1, 2),
    ),
    "a tuple": (
        lambda: Call(lambda self, x: (self.fc2(F.gelu(self.fc1(x))), "more"), **linear_pair()),
        lambda m, x: m(x)[0],
    ),
    "convolutions": (
        lambda: Call(
            lambda self, x: self.fc2(F.relu(self.fc1(x))), fc1=nn.Conv2d(D, H, 1), fc2=nn.Conv2d(H, D, 1)
        ),
        lambda m, x: m(x.transpose(1, 2).unflatten(2, (3, 3))).flatten(2).transpose(1, 2),
    ),
    "plain parameters": (
        lambda: Call(
            lambda self, x: F.gelu(x @ self.up) @ self.down,
            up=nn.Parameter(torch.zeros(D, H)),
            down=nn.Parameter(torch.zeros(H, D)),
        ),
        None,
    ),
    "attention": (lambda: nn.MultiheadAttention(D, 2, batch_first=True), lambda m, x: m(x, x, value=x)[0]),
    "the second layer first": (
        lambda: Call(
            lambda self, x: self.fc2(F.gelu(self.fc1(x))), fc2=nn.Linear(H, D), fc1=nn.Linear(D, H)
        ),
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_beside_keeps_any_module(name: str):
    """It gets its own arguments in its own layout; experts read and change the same tokens as in a plain layout; the
    structure comes again without data."""
    make, call = ODD[name]
    model = around(make(), call)
    before = model(TOKENS)
    report = upcycle_(model, "mlp", experts=3, batches=TOKENS)
    assert torch.equal(model(TOKENS), before)
    assert report.config["width"] == [D]
    assert learns(model, TOKENS)
    fresh = around(make(), call)
    upcycle_(fresh, **json.loads(json.dumps(report.config)))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(TOKENS), model(TOKENS))
    layout, x_BMD = model.mlp, TOKENS + model.attn(TOKENS)
    added = MoE.forward(layout.layer, x_BMD)
    kept = layout.layer.mlp
    expected = x_BMD + added + (kept(x_BMD) if call is None else call(kept, x_BMD))
    torch.testing.assert_close(model(TOKENS), expected)


def split_block(adds: bool) -> nn.Module:
    """Hugging Face's MLP in two modules; the second adds the residual (ViT) or takes one argument (Swin, BEiT)."""

    class Output(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(H, D)

    class Plain(Output):
        def forward(self, x: Tensor) -> Tensor:
            return self.dense(x)

    class Adds(Output):
        def forward(self, x: Tensor, residual: Tensor) -> Tensor:
            return self.dense(x) + residual

    def forward(self: Call, x: Tensor) -> Tensor:
        hidden = self.intermediate(x)
        return self.output(hidden, x) if adds else x + self.output(hidden)

    inner = Call(lambda self, x: F.gelu(self.dense(x)), dense=nn.Linear(D, H))
    return Call(forward, intermediate=inner, output=Adds() if adds else Plain())


@pytest.mark.parametrize("adds", [True, False])
def test_the_output_module_of_swin_takes_one_argument(adds: bool):
    """An MLP in two modules is exchanged whether the second adds the residual or not."""
    for init, router in (("beside", "soft"), ("copy", "identity")):
        model = nn.Sequential(randomize(split_block(adds)))
        before = model(TOKENS)
        upcycle_(model, "0", experts=3, init=init, router=router)
        torch.testing.assert_close(model(TOKENS), before, rtol=1e-9, atol=1e-9)


def turned(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


LAYOUTS = {
    "tokens first": (True, lambda m, x: turned(m(turned(x)))),
    "images first": (False, lambda m, x: m(x)),
    "windows": (False, lambda m, x: m(x.reshape(-1, 3, D)).reshape(x.shape)),
}


@pytest.mark.parametrize("images", [1, 3, 9])
@pytest.mark.parametrize("name", LAYOUTS)
def test_images_never_mix(name: str, images: int):
    """The axis of images is found also with as many images as tokens, or as tokens of a window, and with one image."""
    first, call = LAYOUTS[name]
    model = around(mlp(), call)
    x = torch.randn(images, 9, D, dtype=torch.float64)
    report = upcycle_(model, "mlp", experts=3, init="copy", batches=x)
    assert report.config["tokens_first"] is first
    both = torch.cat([x, x.flip(1)])
    torch.testing.assert_close(model(both)[:1], model(x[:1]))


def test_an_output_with_tokens_first():
    """A model of images that returns (M, B, D) has its images counted in its inputs."""
    net = around(mlp(), lambda m, x: turned(m(turned(x))))
    model = Call(lambda self, x: turned(self.net(x)), net=net)
    report = upcycle_(model, "net.mlp", experts=3, batches=TOKENS)
    assert (report.images, report.config["tokens_first"], report.moved) == (5, True, 0.0)


def test_inputs_with_tokens_first_are_asked_for():
    """Where the first axis of the batches is not that of images, attention gives it away."""
    model = Call(lambda self, x: turned(self.net(turned(x))), net=around(mlp(), lambda m, x: turned(m(turned(x)))))
    with pytest.raises(ValueError, match=r"first axis of batches is not that of images.*: give tokens_first=True"):
        upcycle_(model, "net.mlp", experts=3, batches=turned(TOKENS))
    report = upcycle_(model, "net.mlp", experts=3, batches=turned(TOKENS), tokens_first=True)
    assert report.moved == 0.0
    packed = around(mlp(), lambda m, x: m(x.flatten(0, 1)[None]).view_as(x))
    with pytest.raises(ValueError, match=r"\(1, 45, 16\) for 5 images and \(1, 9, 16\) for 1, which does not tell"):
        upcycle_(packed, "mlp", experts=3, batches=TOKENS)
    fixed = Call(lambda self, x: self.net(x.view(5, 9, D)), net=around(mlp()))
    with pytest.raises(ValueError, match=r"runs 5 images, but not 1 .*give tokens_first"):
        upcycle_(fixed, "net.mlp", experts=3, batches=TOKENS)


def test_a_router_with_places():
    """It gets rows and columns of a grid of tokens, and is refused where there are none."""
    model = around(mlp(), lambda m, x: m(x.unflatten(1, (3, 3))).flatten(1, 2))
    upcycle_(model, "mlp", experts=9, router="placed", batches=TOKENS)
    with record(model) as recording:
        model(TOKENS)
    (routing,) = recording.routings.values()
    weights_MS = routing.dispatch_weights.mean(0).flatten(1)
    assert weights_MS.shape == (9, 9)
    assert torch.equal(weights_MS.argmax(0).sort().values, torch.arange(9))
    with pytest.raises(ValueError, match=r"needs inputs with rows and columns.* gets \(5, 9, 16\): use router='soft'"):
        upcycle_(around(mlp()), "mlp", experts=4, router="placed", batches=TOKENS)


def test_copies_of_layers_in_any_order():
    """The matrices of an MLP are told apart by their shapes, Llama's w1, w2, w3 and a second layer first."""

    def llama() -> Call:
        shapes = {"w1": (D, H), "w2": (H, D), "w3": (D, H)}
        return Call(
            lambda self, x: self.w2(F.silu(self.w1(x)) * self.w3(x)),
            **{name: nn.Linear(*shape, bias=False) for name, shape in shapes.items()},
        )

    for make in (llama, ODD["the second layer first"][0]):
        model = around(make())
        before = model(TOKENS)
        upcycle_(model, "mlp", experts=3, init="copy", router="identity")
        torch.testing.assert_close(model(TOKENS), before, rtol=1e-9, atol=1e-9)
        assert upcycle_(around(make()), "mlp", experts=3).config["width"] == [D]


def test_wrappers():
    """The report of a model in DataParallel serves the plain one; what inference mode makes can be trained."""
    model = nn.DataParallel(Timm())
    report = upcycle_(model, "module.blocks.*.mlp", experts=3, batches=IMAGES)
    assert report.modules == ("blocks.0.mlp", "blocks.1.mlp")
    fresh = Timm()
    upcycle_(fresh, **report.config)
    fresh.load_state_dict(model.module.state_dict())
    assert torch.equal(fresh(IMAGES), model(IMAGES))
    other = Timm()
    with torch.inference_mode():
        upcycle_(other, experts=3, init="beside", batches=IMAGES)
    assert learns(other, IMAGES)


@dataclass
class Output:
    hidden: Tensor
    logits: Tensor


def test_outputs_and_single_vectors():
    """Logits are read from an object; vectors without tokens are said to be images of one token each."""
    model = Call(lambda self, x: Output(x, self.net(x)), net=Timm())
    assert upcycle_(model, experts=3, batches=IMAGES).same_class == 1.0
    flat = nn.Sequential(randomize(mlp()))
    report = upcycle_(flat, "0", experts=3, batches=TOKENS[0])
    assert "0 gets vectors (9, 16): each is taken for an image of one token" in str(report)


def towers() -> Box:
    return Box(text_model=Timm(), vision_model=Timm())


def shared() -> Timm:
    model = Timm()
    model.blocks[1].mlp = model.blocks[0].mlp
    return model


def loss_of(model: nn.Module) -> Call:
    return Call(lambda self, x: self.net(x).sum(), net=model)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: upcycle_(Timm(), batches=[]), "batches= is empty"),
        (lambda: upcycle_(Timm(), batches=3), "batches must be inputs of the model.* got 3"),
        (lambda: upcycle_(Timm(), batches=["cat.jpg"]), "a batch must be a tensor, .* got a str"),
        (lambda: upcycle_(Timm(), batches=[IMAGES, torch.arange(6)]), r"a tuple \(images, labels\) is one"),
        (lambda: upcycle_(Timm(), blocks=2), "blocks must be .* indices of the 2 matches, got 2"),
        (lambda: upcycle_(Timm(), blocks=[]), r"blocks must be .* got \[\]"),
        (lambda: upcycle_(Timm(), nn.Linear(2, 2)), "mlps must be the name of modules.* got a Linear"),
        (lambda: upcycle_(Timm(), []), r"mlps must be the name of modules.* got \[\]"),
        (lambda: upcycle_(Timm(), ["blocks.*", "blocks.*.mlp"]), r"blocks\.0 and blocks\.0\.mlp inside it"),
        (lambda: upcycle_(Timm(), "head", batches=IMAGES), r"head gets \(6, 16\) and returns \(6, 5\): mlps= must"),
        (lambda: upcycle_(Timm(), "head"), "head, a Linear, does not return the width of its input"),
        (lambda: upcycle_(Timm(), "blocks.*.mlp.fc1", batches=IMAGES), r"\(6, 10, 16\) and returns \(6, 10, 24\)"),
        (lambda: upcycle_(shared()), r"blocks\.0\.mlp and blocks\.1\.mlp are one module"),
        (lambda: upcycle_(loss_of(Timm()), batches=IMAGES), "got a single number, such as a loss"),
        (lambda: upcycle_(Timm(), batches=IMAGES * float("nan")), "some are infinite or not a number"),
        (lambda: upcycle_(torch.compile(Timm(), backend="eager"), batches=IMAGES), "upcycle_ first, then torch.comp"),
        (lambda: upcycle_(nn.Sequential(mlp()), "0", batches=[torch.randn(D)]), r"0 gets \(16,\) and returns \(16,\)"),
        (lambda: upcycle_(towers()), r"'text_model\.blocks\.\*\.mlp' and 'vision_model\.blocks\.\*\.mlp'; slots mix"),
        (lambda: upcycle_(Timm(), width=[16]), "one for each of 2 modules, got 1"),
        (lambda: upcycle_(Box(layer=nn.TransformerEncoderLayer(D, 2, H)), "layer"), r"MLP \(linear1 .* is no module"),
    ],
)  # fmt: skip
def test_mistakes(call, words):
    """One sentence that says what to do."""
    with pytest.raises(ValueError, match=words) as error:
        call()
    assert "\n" not in str(error.value)


def test_both_towers_if_both_are_named():
    """A list of full names may be of several parts of a model."""
    names = [f"{tower}.blocks.*.mlp" for tower in ("text_model", "vision_model")]
    assert len(upcycle_(towers(), names, experts=2).modules) == 4
