"""The suites that compare our layer with other PyTorch implementations, each in its fastest honest form.

They come with `pip install 'softmoe-vit[peers]'`. A rival gets the same width, hidden width, experts and slots, one
routing for a whole MLP, and every option of its own that makes it faster. Its products are then the same as ours; tests
state how its routing departs from the paper. In `bench_peers` a rival's layer replaces ours in our transformer, and
each model is timed in a process of its own; ours also with updates in the backward pass, and with bfloat16 moments.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import torch
from torch import nn

from softmoe import accelerate
from softmoe.accelerate.buffers import InBackward
from softmoe.bench.cases import Contender, D, H, M, Row, compare, forward_step
from softmoe.bench.timing import Probes, Timing, Work, interleave, mlp, soft_layer
from softmoe.budget import cost
from softmoe.models import VisionTransformer, ViTConfig, model_config
from softmoe.models.transformer import MLP, Block
from softmoe.moe import MoE, SoftConfig, SoftMoE
from softmoe.storage.files import first_line
from softmoe.train.config import OptimSection
from softmoe.train.optim import make_optimizer, set_learning_rate

Build = Callable[[int, int, int, int], nn.Module]
"""(width, hidden width, experts, slots per expert) -> layer"""

MODEL = "soft_s16_128e"
SETTLING = 3
"""Steps before the timed ones, in which a process still gets its memory from the system, page by page."""
OURS = {
    "softmoe": OptimSection(),
    "softmoe, in backward": OptimSection(in_backward=True),
    "softmoe, in backward, bfloat16 states": OptimSection(in_backward=True, states="bfloat16"),
}


def soft_moe_pytorch(dim: int, hidden_dim: int, experts: int, slots: int) -> nn.Module:
    """Build soft-moe-pytorch's layer, without its default of moving every expert to the device in each pass."""
    return import_module("soft_moe_pytorch").SoftMoE(
        dim=dim,
        num_experts=experts,
        num_slots=slots,
        expert_mult=hidden_dim // dim,
        offload_unused_experts_to_cpu=False,
    )


def soft_mixture_of_experts(dim: int, hidden_dim: int, experts: int, slots: int) -> nn.Module:
    """Build soft-mixture-of-experts' layer with two of its stacked linear layers as experts, routed once.

    Its own experts are single linear layers. Of torch's GELUs the exact one is faster on a CPU.
    """
    linears = import_module("soft_mixture_of_experts.multi_expert").MultiExpertLayer
    layer = import_module("soft_mixture_of_experts.soft_moe").SoftMoE(dim, dim, experts, slots)
    layer.experts = nn.Sequential(linears(dim, hidden_dim, experts), nn.GELU(), linears(hidden_dim, dim, experts))
    return layer


def soft_moe(dim: int, hidden_dim: int, experts: int, slots: int) -> nn.Module:
    """Build soft-moe's layer around plain MLPs, from its file alone: the package imports timm, which is not needed."""
    package = find_spec("soft_moe")
    if package is None or package.submodule_search_locations is None:
        raise ModuleNotFoundError("No module named 'soft_moe'")
    spec = spec_from_file_location("soft_moe_layer", Path(package.submodule_search_locations[0]) / "soft_moe.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)

    def expert() -> nn.Module:
        return nn.Sequential(nn.Linear(dim, hidden_dim), nn.GELU(), nn.Linear(hidden_dim, dim))

    return module.SoftMoELayerWrapper(dim, experts, slots, expert)


PEERS: dict[str, Build] = {
    "soft-moe-pytorch": soft_moe_pytorch,
    "soft-mixture-of-experts": soft_mixture_of_experts,
    "soft-moe": soft_moe,
}


def available_peers() -> tuple[dict[str, Build], list[str]]:
    """Return the rivals that can be built here, and a line for each that cannot."""
    found, skipped = {}, []
    for name, make in PEERS.items():
        try:
            make(8, 32, 2, 1)
        except Exception as error:  # other people's packages fail to import in many ways
            skipped.append(f"{name}: skipped, {first_line(error)}")
        else:
            found[name] = make
    return found, skipped


def bench_layer(probes: Probes, *, seconds: float = 15.0) -> Iterator[Row]:
    """Time one S/16 layer: 128 experts at batch 1, 8 and 32, and 32 experts with 4 slots at batch 32."""
    peers, _ = available_peers()
    for N, P, B in ((128, 1, 1), (128, 1, 8), (128, 1, 32), (32, 4, 32)):
        tokens = torch.randn(B, M, D)
        contenders = {
            "softmoe": Contender(SoftMoE(D, N, P, H), tokens, soft_layer(B, M, D, H, N, P), accelerated=True),
            "softmoe, plain": Contender(SoftMoE(D, N, P, H), tokens, soft_layer(B, M, D, H, N, P)),
            "MLP, equal rows": Contender(MLP(D, H), torch.randn(B * N * P, D), mlp(B * N * P, D, H)),
        }
        for name, make in peers.items():
            contenders[name] = Contender(make(D, H, N, P), tokens, None)
        yield from compare(f"{N} experts x {P}, batch {B}", contenders, probes, train=True, seconds=seconds)


def bench_peers(probes: Probes, *, seconds: float = 15.0, model: str = MODEL) -> Iterator[Row]:
    """Time S/16 128E at batch 8 and 32, train and forward: one process after the other, in 16 GB of memory."""
    names = [*OURS, *available_peers()[0]]
    for batch in (8, 32):
        for phase in ("train", "forward"):
            for name in names if phase == "train" else [n for n in names if n not in list(OURS)[1:]]:
                yield in_own_process(model, name, batch, phase, seconds)


def in_own_process(model: str, name: str, batch: int, phase: str, seconds: float) -> Row:
    """Run `measure` in a new process. OSError in one sentence if it fails."""
    command = [sys.executable, "-m", "softmoe.bench.peers", model, name, str(batch), phase, str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
        raise OSError(f"{name} at batch {batch} did not finish: {reason}")
    said = json.loads(done.stdout.splitlines()[-1])
    return Row(**{**said, "timing": Timing(**said["timing"])})


def measure(model: str, name: str, batch: int, phase: str, seconds: float) -> Row:
    """Time one contender in turn with the probes of the roofline, after reading the peak memory without them."""
    config, price = model_config(model), cost(model)
    module = build(config, name)
    x = torch.randn(batch, 3, *config.image_shape)
    step = (
        forward_step(Contender(module, x, None, accelerated=True))
        if phase == "forward"
        else train_step(module, x, OURS.get(name, OptimSection()))
    )
    for _ in range(SETTLING):
        step()
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024  # bytes
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    probes = Probes()
    timings = interleave({name: step, **probes.functions()}, rounds=9, seconds=seconds)
    work = Work(batch * price.macs, price.params, x.numel())
    least = probes.roofline(timings).seconds(*getattr(work, phase)())
    return Row(f"{model}, batch {batch}", phase, name, timings[name], least / timings[name].median, peak)


def build(config: ViTConfig, name: str) -> nn.Module:
    """Build our model, or our transformer with the layers of the rival of that name."""
    torch.manual_seed(0)
    if name in OURS:
        return VisionTransformer(config)
    return with_layers(config, partial(PEERS[name], config.width, config.mlp_dim))


def with_layers(config: ViTConfig, make: Callable[[int, int], nn.Module]) -> VisionTransformer:
    """Build our transformer with the layers of `make(experts, slots)` in place of ours, which are never built."""
    assert config.moe is not None
    assert isinstance(config.moe.router, SoftConfig)
    model = VisionTransformer(replace(config, moe=None))
    for index in config.moe_blocks:
        block = model.encoder.blocks[index]
        assert isinstance(block, Block)
        assert not isinstance(block.mlp, MoE)
        block.mlp = make(config.moe.num_experts, config.moe.router.slots_per_expert)
    return model


def train_step(module: nn.Module, x: torch.Tensor, optim: OptimSection) -> Callable[[], object]:
    """Return a function that does forward, backward and the update that `optim` describes."""
    module.train()
    optimizer = make_optimizer(module, optim)
    set_learning_rate(optimizer, 1e-5)
    accelerate.apply(module, optimizer)
    inside = InBackward(optimizer) if optim.in_backward else None

    def step() -> None:
        optimizer.zero_grad()
        module(x).square().mean().backward()
        if inside is None:
            optimizer.step()
        else:
            inside.finish()

    return step


if __name__ == "__main__":
    found = measure(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], float(sys.argv[5]))
    print(json.dumps(asdict(found)))
