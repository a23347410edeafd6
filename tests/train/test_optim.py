import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from softmoe.accelerate.guards import skipped_where
from softmoe.models import MoEConfig, VisionTransformer, ViTConfig
from softmoe.parallel import clip_by_global_norm
from softmoe.storage.checkpoint import optimizer_tensors
from softmoe.train import muon
from softmoe.train.config import OptimSection
from softmoe.train.muon import orthogonalized
from softmoe.train.optim import make_optimizer, parameter_groups, set_learning_rate

DECAYS = OptimSection(head_decay=3.0, kernel_decay=0.03, scale_decay=0.5)


def decays(config: ViTConfig, section: OptimSection = DECAYS) -> dict[str, float]:
    groups = parameter_groups(VisionTransformer(config), section)
    return {name: group["weight_decay"] for group in groups for name in group["names"]}


def small(**changes) -> ViTConfig:
    return ViTConfig(image_size=8, patch_size=4, width=8, depth=1, mlp_dim=8, heads=2, num_classes=3, **changes)


def test_decay_of_a_soft_model():
    """Matrices 0.03, the head's 3.0, the router's scale its own, all else 0: behaviour of the paper's code."""
    moe = MoEConfig.of("soft", num_experts=2, blocks=(0,))
    found = decays(small(moe=moe, pool="attention", representation_size=4))
    block = "encoder.blocks.0"
    matrices = {
        "embed.proj.weight",
        f"{block}.attention.qkv.weight",
        f"{block}.attention.out.weight",
        f"{block}.mlp.experts.w1",
        f"{block}.mlp.experts.w2",
        "pool.attention.qkv.weight",
        "pool.attention.out.weight",
        "pool.mlp.fc1.weight",
        "pool.mlp.fc2.weight",
        "pre_logits.weight",
    }
    expected = dict.fromkeys(found, 0.0) | dict.fromkeys(matrices, 0.03)
    expected |= {"head.weight": 3.0, f"{block}.mlp.router.scale": 0.5}
    assert found == expected
    assert {f"{block}.mlp.router.phi", "positions.table", "pool.probe", f"{block}.norm1.weight"} <= found.keys()


def test_decay_of_a_sparse_model():
    """A sparse router's matrix and the dense MLPs are decayed; the class token is not."""
    moe = MoEConfig.of("tokens_choice", num_experts=2, blocks=())
    found = decays(small(moe=moe, pool="class"))
    assert found["encoder.blocks.0.mlp.fc1.weight"] == found["encoder.blocks.0.mlp.fc2.weight"] == 0.03
    assert found["class_token"] == found["encoder.blocks.0.mlp.fc1.bias"] == 0.0
    moe = MoEConfig.of("tokens_choice", num_experts=2, blocks=(0,))
    assert decays(small(moe=moe))["encoder.blocks.0.mlp.router.weight"] == 0.03


def test_every_parameter_is_trained_once():
    """The groups are a partition of the parameters."""
    model = VisionTransformer(small(moe=MoEConfig.of(num_experts=2)))
    names = [name for group in parameter_groups(model, DECAYS) for name in group["names"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_patterns_come_first():
    """A user's decay pattern wins over the rules, the first of several wins, and lr factors scale or freeze."""
    section = OptimSection(
        kernel_decay=0.03,
        decay_patterns=((r"qkv", 0.7), (r"attention", 0.9)),
        lr_patterns=((r"^head", 10.0), (r"embed", 0.0)),
    )
    model = VisionTransformer(small())
    optimizer = make_optimizer(model, section)
    set_learning_rate(optimizer, 0.5)
    by_name = {name: group for group in optimizer.param_groups for name in group["names"]}
    assert by_name["encoder.blocks.0.attention.qkv.weight"]["weight_decay"] == 0.7
    assert by_name["encoder.blocks.0.attention.out.bias"]["weight_decay"] == 0.9
    assert by_name["head.weight"]["lr"] == 5.0
    assert by_name["encoder.blocks.0.mlp.fc1.weight"]["lr"] == 0.5
    assert "embed.proj.weight" not in by_name
    assert not model.embed.proj.weight.requires_grad


def test_freeze_leaves_the_lower_blocks_and_what_is_before_them():
    """Half of four blocks: embedding, positions, class token and two blocks get no gradient; all above learn."""
    beside = MoEConfig.of(num_experts=2, blocks=(1, 3), keep_mlp=True)
    model = VisionTransformer(replace(small(pool="class", registers=2, moe=beside), depth=4))
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    before = {name: p.clone() for name, p in model.named_parameters()}
    optimizer = make_optimizer(model, OptimSection(freeze=0.5))
    set_learning_rate(optimizer, 0.1)
    model(torch.randn(2, 3, *model.config.image_shape)).square().sum().backward()
    optimizer.step()
    lower = ("embed.", "positions.", "class_token", "registers", "encoder.blocks.0.", "encoder.blocks.1.")
    for name, parameter in model.named_parameters():
        assert name.startswith(lower) == (parameter.grad is None) == torch.equal(parameter, before[name]), name


def test_a_pattern_without_parameters_is_an_error():
    """A pattern that matches nothing is a typo, and is said so with the names there are."""
    with pytest.raises(ValueError, match=r"'heda' matches no parameter; names look like"):
        parameter_groups(VisionTransformer(small()), OptimSection(lr_patterns=(("heda", 2.0),)))
    with pytest.raises(ValueError, match="nothing to train"):
        parameter_groups(VisionTransformer(small()), OptimSection(lr_patterns=((".", 0.0),)))
    with pytest.raises(ValueError, match=r"bias\$' is never used: earlier ones match all of its parameters"):
        decays(small(), replace(DECAYS, lr_patterns=((r"^head\.", 0.5), (r"^head\.bias$", 0.1))))


def linear(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(3, 2, dtype=torch.float64)


def test_adamw_is_the_plain_formula():
    """Three steps equal p - lr (m^ / (sqrt(v^) + eps) + decay p): decay decoupled and times the learning rate."""
    model = linear()
    optimizer = make_optimizer(model, OptimSection(decay_patterns=((r"weight", 0.1),)))
    p = model.weight.detach().clone()
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for t in range(1, 4):
        lr = 0.01 * t
        set_learning_rate(optimizer, lr)
        optimizer.zero_grad()
        model(torch.ones(1, 3, dtype=torch.float64) * t).square().sum().backward()
        assert model.weight.grad is not None
        g = model.weight.grad.clone()
        optimizer.step()
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        adam = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        p = p - lr * (adam + 0.1 * p)
        torch.testing.assert_close(model.weight.detach(), p, rtol=1e-10, atol=1e-12)


def test_sgd_has_momentum():
    """Two steps of SGD: buffer = g + 0.9 buffer, and no decay where no rule matches."""
    model = linear()
    optimizer = make_optimizer(model, OptimSection(name="sgd"))
    set_learning_rate(optimizer, 0.1)
    start = model.weight.detach().clone()
    for _ in range(2):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    torch.testing.assert_close(model.weight.detach(), start - 0.1 * (1 + 1.9))


def muon_twins() -> list[VisionTransformer]:
    """Two equal float64 models with experts in the second of two blocks, and the same gradient everywhere."""
    moe = MoEConfig.of("soft", num_experts=2, blocks=(1,))
    torch.manual_seed(0)
    twins = [VisionTransformer(replace(small(moe=moe), depth=2)).double() for _ in range(2)]
    twins[1].load_state_dict(twins[0].state_dict())
    for one, other in zip(*(twin.parameters() for twin in twins), strict=True):
        one.grad = torch.randn_like(one)
        other.grad = one.grad.clone()
    return twins


def by_singular_values(direction: torch.Tensor) -> torch.Tensor:
    """Apply the polynomial of Newton and Schulz five times to the singular values of a matrix."""
    u, s, v = torch.linalg.svd(direction / (direction.norm() + 1e-7), full_matrices=False)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return 0.2 * max(direction.shape) ** 0.5 * u @ torch.diag(s) @ v


def test_muon_is_its_formula_on_matrices_and_adamw_elsewhere():
    """Two steps: matrices by their singular values; experts, query, key and value each apart; all else as AdamW.

    Experts have a momentum of their own.
    """
    model, twin = muon_twins()
    optimizer, plain = (
        make_optimizer(m, replace(DECAYS, name=n, expert_momentum=0.7)) for m, n in ((model, "muon"), (twin, "adamw"))
    )
    names = {name for group in optimizer.param_groups if group["muon"] for name in group["names"]}
    blocks = [f"encoder.blocks.{i}.attention.{name}.weight" for i in (0, 1) for name in ("qkv", "out")]
    experts = ["encoder.blocks.1.mlp.experts.w1", "encoder.blocks.1.mlp.experts.w2"]
    assert names == {*blocks, *experts, "encoder.blocks.0.mlp.fc1.weight", "encoder.blocks.0.mlp.fc2.weight"}
    expected = {name: p.detach().clone() for name, p in model.named_parameters() if name in names}
    momentum = dict.fromkeys(names, 0.0)
    for lr in (0.1, 0.2):
        for own in (optimizer, plain):
            set_learning_rate(own, lr)
            own.step()
        for name, weight in expected.items():
            g = model.get_parameter(name).grad
            share = 0.7 if "experts" in name else 0.95
            momentum[name] = share * momentum[name] + g
            direction = g + share * momentum[name]
            parts = direction.unbind() if "experts" in name else direction.chunk(3 if "qkv" in name else 1)
            update = torch.cat([by_singular_values(part) for part in parts]).view_as(direction)
            expected[name] = weight * (1 - lr * 0.03) - lr * update
    for (name, found), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found.detach(), expected.get(name, other.detach()), rtol=1e-9, atol=1e-10, msg=name)


def test_muon_takes_an_mlp_of_three_widths_whole():
    """Only query, key and value are three matrices in one, whatever has their shape."""
    torch.manual_seed(0)
    model = VisionTransformer(ViTConfig(image_size=8, patch_size=4, width=8, depth=1, mlp_dim=24, heads=2)).double()
    optimizer = make_optimizer(model, OptimSection(name="muon", kernel_decay=0.0, clip_norm=None))
    set_learning_rate(optimizer, 0.1)
    model(torch.randn(2, 3, 8, 8, dtype=torch.float64)).square().sum().backward()
    weight = model.get_parameter("encoder.blocks.0.mlp.fc1.weight")
    before, gradient = weight.detach().clone(), weight.grad
    assert gradient is not None
    optimizer.step()
    expected = before - 0.1 * by_singular_values(1.95 * gradient)
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-9, atol=1e-10)


def test_muon_takes_many_matrices_at_once_or_few(monkeypatch):
    """How many parameters are stepped together, all, two or one, changes nothing but rounding."""
    results = []
    for most in (1 << 22, 200, 1):
        monkeypatch.setattr(muon, "BATCH", most)
        model, _ = muon_twins()
        optimizer = make_optimizer(model, replace(DECAYS, name="muon"))
        for lr in (0.1, 0.2):
            set_learning_rate(optimizer, lr)
            optimizer.step()
        results.append(list(model.parameters()))
    for others in results[1:]:
        torch.testing.assert_close(results[0], others, rtol=1e-12, atol=1e-13)


def test_muon_makes_singular_values_alike():
    """Orthogonalizing brings singular values near 1, whatever they were, of wide, tall and stacked matrices."""
    torch.manual_seed(0)
    for shape in ((8, 24), (24, 8), (3, 8, 8)):
        found = torch.linalg.svdvals(orthogonalized(torch.randn(shape) * torch.logspace(0, 1, shape[-1])))
        assert 0.3 < found.min() <= found.max() < 1.3


def test_muon_that_skips_a_step_changes_nothing():
    """Where the flag is set no weight and no momentum changes, also by a gradient of NaN; the next step is taken."""
    model, _ = muon_twins()
    optimizer = make_optimizer(model, OptimSection(name="muon"))
    set_learning_rate(optimizer, 0.1)
    optimizer.step()
    before = [t.clone() for t in (*model.parameters(), *optimizer_tensors(optimizer).values())]
    good = [p.grad for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.nan)
    with skipped_where(optimizer, torch.tensor(True)):
        optimizer.step()
    after = [*model.parameters(), *optimizer_tensors(optimizer).values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    for p, grad in zip(model.parameters(), good, strict=True):
        p.grad = grad
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=False))


@pytest.mark.parametrize("how", ["copied", "loaded"])
def test_muon_goes_on_from_a_copy_and_from_its_state(how: str):
    """A deep copy, and an optimizer that loads the state dict, take the next step to the same bits."""
    model, _ = muon_twins()
    optimizer = make_optimizer(model, replace(DECAYS, name="muon"))
    set_learning_rate(optimizer, 0.1)
    optimizer.step()
    other, gone_on = copy.deepcopy((model, optimizer))
    for one, its in zip(model.parameters(), other.parameters(), strict=True):
        its.grad = one.grad
    if how == "loaded":
        gone_on = make_optimizer(other, replace(DECAYS, name="muon"))
        gone_on.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for own in (optimizer, gone_on):
        set_learning_rate(own, 0.2)
        own.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_clip_golden():
    """(1, 2) clipped to norm 2 is 2 / sqrt(5) times itself, with no epsilon; the norm before comes back."""
    grad = torch.tensor([1.0, 2.0], dtype=torch.float64)
    norm = clip_by_global_norm([grad], 2.0)
    assert norm.item() == pytest.approx(5**0.5, rel=1e-15)
    assert grad.tolist() == pytest.approx([2 / 5**0.5, 4 / 5**0.5], rel=1e-15)


@given(
    st.lists(st.lists(st.floats(-100, 100), min_size=1, max_size=5), min_size=1, max_size=4),
    st.floats(0.01, 1000) | st.none(),
)
def test_clip_by_global_norm(values: list[list[float]], limit: float | None):
    """The joint norm is at most the limit; gradients within it, and all without a limit, stay as they are."""
    grads = [torch.tensor(v, dtype=torch.float64) for v in values]
    before = [g.clone() for g in grads]
    norm = float(clip_by_global_norm(grads, limit))
    expected = sum(float((g * g).sum()) for g in before) ** 0.5
    assert norm == pytest.approx(expected, rel=1e-12)
    factor = 1.0 if limit is None or norm <= limit else limit / norm
    for grad, old in zip(grads, before, strict=True):
        torch.testing.assert_close(grad, old * factor, rtol=1e-12, atol=0.0)
