"""The memory estimate, against the tensors that autograd really keeps."""

from dataclasses import replace

import pytest
import torch
from routers import moe_of

from softmoe.accelerate import buffers
from softmoe.budget import blocks_to_recompute, cost, memory
from softmoe.budget.memory import MAX_IN_FLIGHT, WAITING, activation_memory, block_bytes
from softmoe.models import MoEConfig, VisionTransformer, ViTConfig
from softmoe.moe.config import ROUTERS
from softmoe.storage.checkpoint import optimizer_tensors
from softmoe.train.config import OptimSection
from softmoe.train.optim import make_optimizer

BASE = ViTConfig(image_size=(64, 48), patch_size=8, width=64, depth=4, mlp_dim=256, heads=4, num_classes=11)
CASES = {
    "dense": BASE,
    "dropout": replace(BASE, dropout=0.1),
    "attention dropout": replace(BASE, attention_dropout=0.1),
    "attention pool": replace(BASE, pool="attention"),
    "class token": replace(BASE, pool="class", representation_size=30),
    "no qk norm": replace(BASE, qk_norm=False),
    "merged": replace(BASE, pool="class", attention_dropout=0.1, merge=(1, 9)),
    "merged, all in the head": replace(BASE, pool="concat", merge=(1, 9)),
    "head on several blocks": replace(BASE, pool="class", head_blocks=(0, 1)),
    "soft with dropout": replace(BASE, dropout=0.1, moe=MoEConfig.of("soft", 8, slots_per_expert=6)),
    "long groups": replace(BASE, moe=MoEConfig.of("tokens_choice", 8, top_k=2, group_size=96)),
    "one moe": replace(BASE, moe=MoEConfig.of("soft", 8, slots_per_expert=6, blocks=(0,))),
    "beside": replace(BASE, moe=MoEConfig.of("soft", 8, slots_per_expert=6, expert_dim=16, keep_mlp=True)),
    "beside narrow": replace(BASE, dropout=0.1, moe=MoEConfig.of("soft", 8, keep_mlp=True, kept_dim=40, blocks=(1,))),
    "slots that stay": replace(
        BASE, moe=MoEConfig.of("soft", 8, slots_per_expert=2, slots_stay=True, blocks=(1, 2, 3))
    ),
    **{router: replace(BASE, moe=moe_of(router, 8, slots_per_expert=6)) for router in ROUTERS},
}


def kept_bytes(config: ViTConfig, batch_size: int, recomputed: tuple[int, ...] = ()) -> int:
    """Bytes of the storages that a training forward pass leaves for the backward pass, parameters aside; the inputs of
    recomputed blocks, which torch holds itself, are added."""
    model = VisionTransformer(config).train()
    model.encoder.recomputed = recomputed
    inputs = len(recomputed) * batch_size * config.tokens * config.width * 4
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    storages: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.randn(batch_size, 3, *config.image_shape)).square().sum()
    return inputs + sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("name", CASES)
def test_activations_are_near_what_autograd_keeps(name: str) -> None:
    """Within 6 % for every router and option, in float32 on a CPU."""
    config = CASES[name]
    assert memory(config, 4).activations == pytest.approx(kept_bytes(config, 4), rel=0.06)


def test_gradient_checkpointing_keeps_one_block() -> None:
    """The inputs of all blocks and the inside of the largest; twice the depth adds inputs only."""
    shallow, deep = BASE, replace(BASE, depth=8)
    kept = [memory(c, 4, recomputed=range(c.depth)).activations for c in (shallow, deep)]
    assert kept[1] - kept[0] == 4 * (4 * 48 * 64) * 4
    assert kept[0] < memory(shallow, 4).activations


@pytest.mark.parametrize("name", ["dense", "one moe", "soft", "tokens_choice", "beside"])
@pytest.mark.parametrize("share", [1.0, 0.8, 0.6, 0.4])
def test_as_few_blocks_as_fit_are_computed_twice(name: str, share: float) -> None:
    """The choice keeps to the limit, by formula and by the tensors that autograd keeps after a forward pass (within
    8 %); with one block less it would not. With room for all nothing is computed twice."""
    config = replace(CASES[name], depth=6)
    whole = memory(config, 4).activations
    chosen = blocks_to_recompute(config, 4, 4, share * whole)
    assert activation_memory(config, 4, 4, chosen) <= share * whole
    assert kept_bytes(config, 4, chosen) <= 1.08 * share * whole
    assert (len(chosen) > 0) == (share < 1)
    for left_out in chosen:
        assert activation_memory(config, 4, 4, set(chosen) - {left_out}) > share * whole


def test_the_blocks_that_free_most_come_first() -> None:
    """A block of narrow experts beside its MLP keeps routing weights for little work: it is computed twice before dense
    ones are, and of those the lowest. Too little room for any choice is said."""
    slots = MoEConfig.of("soft", 8, slots_per_expert=12, expert_dim=16, keep_mlp=True, blocks=(3,))
    config = replace(BASE, depth=6, moe=slots)
    whole, inside = memory(config, 4).activations, [kept for _, kept in block_bytes(config, 4, 4)]
    assert blocks_to_recompute(config, 4, 4, whole - 1) == (3,)
    assert blocks_to_recompute(config, 4, 4, whole - inside[3]) == (0, 3)
    with pytest.raises(ValueError, match="even if every block is computed twice, more than the 1e-06 GB"):
        blocks_to_recompute(config, 4, 4, 1e3)


def test_weights_gradients_and_optimizer_are_exact() -> None:
    """Four bytes each; AdamW keeps two more numbers per parameter, momentum one."""
    params = cost(BASE).params
    m = memory(BASE, 1)
    assert (m.weights, m.gradients, m.optimizer_state) == (4 * params, 4 * params, 8 * params)
    assert m.total == 16 * params + m.activations
    assert memory(BASE, 1, optimizer="sgd").optimizer_state == 4 * params
    assert memory(BASE, 1, weight_bytes=2, activation_bytes=2).weights == 2 * params


@pytest.mark.parametrize(
    "moe", [None, MoEConfig.of("soft", 4, blocks=(1,)), MoEConfig.of("soft", 4, keep_mlp=True, kept_dim=24)]
)
def test_state_of_muon_is_exact(moe: MoEConfig | None) -> None:
    """One number less for every weight of a matrix in attention and MLPs, counted in the state after a step."""
    config = replace(BASE, moe=moe)
    model = VisionTransformer(config)
    optimizer = make_optimizer(model, OptimSection(name="muon"))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    kept = [value for key, value in optimizer_tensors(optimizer).items() if not key.endswith("/step")]
    assert memory(config, 1, optimizer="muon").optimizer_state == 4 * sum(value.numel() for value in kept)


def test_small_states_and_updates_in_the_backward_pass() -> None:
    """Moments of two bytes are half; gradients are those of the largest parameter where that is less than all."""
    params = cost(BASE).params
    assert memory(BASE, 1, state_bytes=2).optimizer_state == 4 * params
    assert memory(BASE, 1, in_backward=True).gradients == 4 * params  # all of them wait for each other
    many = replace(BASE, moe=MoEConfig.of("soft", 2048))
    largest = max(p.numel() for p in _on_meta(many).parameters())
    assert memory(many, 1, in_backward=True).gradients == 4 * largest + WAITING
    assert memory(many, 1, in_backward=True, state_bytes=2).gradients == 8 * largest + WAITING  # two at work


def _on_meta(config: ViTConfig) -> VisionTransformer:
    with torch.device("meta"):
        return VisionTransformer(config)


def test_grows_with_the_batch_and_shrinks_with_precision() -> None:
    """Activations are in proportion to the batch; half precision saves less than half, for the router stays float32."""
    soft = CASES["soft"]
    one, two, four = (memory(soft, batch).activations for batch in (1, 2, 4))
    assert four - two == 2 * (two - one)
    half = memory(soft, 64, activation_bytes=2).activations
    assert 0.5 < half / memory(soft, 64).activations < 0.8


def test_mistakes() -> None:
    """An empty batch and an unknown optimizer are refused."""
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        memory(BASE, 0)
    with pytest.raises(ValueError, match="unknown optimizer 'lion', expected one of: adamw"):
        memory(BASE, 1, optimizer="lion")


def test_the_limits_of_updates_in_the_backward_pass():
    """The formulas count with the limits that the buffers of gradients keep."""
    assert (MAX_IN_FLIGHT, WAITING) == (buffers.MAX_IN_FLIGHT, buffers.WAITING)
