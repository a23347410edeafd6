"""S/16 128E with its own experts and with those of peers: time and peak memory, each in a process of its own.

A peer's layer stands in the same transformer, in the place of ours. All take the same step: forward, backward, fused
AdamW. Ours is also timed with updates in the backward pass, and with moments in bfloat16 beside that.
"""

import json
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial

import torch
from torch import nn

from softmoe.bench.cases import Row, forward_step
from softmoe.bench.peers import PEERS, available_peers
from softmoe.bench.roofline import Probes
from softmoe.bench.timing import Timing, interleave
from softmoe.bench.work import Work
from softmoe.budget import cost
from softmoe.models import VisionTransformer, ViTConfig, model_config
from softmoe.models.transformer import Block
from softmoe.moe import MoE
from softmoe.train.config import OptimSection
from softmoe.train.in_backward import InBackward, Released
from softmoe.train.optim import make_optimizer, set_learning_rate

MODEL = "soft_s16_128e"
SETTLING = 3
"""Steps before the timed ones: until then a process still gets its memory from the system, page by page."""
OURS = {
    "softmoe": OptimSection(),
    "softmoe, in backward": OptimSection(in_backward=True),
    "softmoe, in backward, bfloat16 states": OptimSection(in_backward=True, states="bfloat16"),
}


def bench_peers(probes: Probes, *, seconds: float = 15.0, model: str = MODEL) -> Iterator[Row]:
    """Batch 8 and 32, train and forward. One process after the other: 16 GB of memory are needed, not more."""
    names = [*OURS, *available_peers()[0]]
    for batch in (8, 32):
        for phase in ("train", "forward"):
            for name in names if phase == "train" else [n for n in names if n not in list(OURS)[1:]]:
                yield in_own_process(model, name, batch, phase, seconds)


def in_own_process(model: str, name: str, batch: int, phase: str, seconds: float) -> Row:
    command = [sys.executable, "-m", "softmoe.bench.peer_models", model, name, str(batch), phase, str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
        raise OSError(f"{name} at batch {batch} did not finish: {reason}")
    said = json.loads(done.stdout.splitlines()[-1])
    return Row(**{**said, "timing": Timing(**said["timing"])})


def measure(model: str, name: str, batch: int, phase: str, seconds: float) -> Row:
    """Time one contender here, in turn with the roofline's probes; the peak is read before they take memory."""
    config, price = model_config(model), cost(model)
    module = build(config, name)
    x = torch.randn(batch, 3, *config.image_shape)
    step = forward_step(module, x) if phase == "forward" else train_step(module, x, OURS.get(name, OptimSection()))
    for _ in range(SETTLING):
        step()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    probes = Probes()
    timings = interleave({name: step, **probes.functions()}, rounds=9, seconds=seconds)
    work = Work(batch * price.macs, price.params, x.numel())
    least = probes.roofline(timings).seconds(*getattr(work, phase)())
    return Row(f"{model}, batch {batch}", phase, name, timings[name], least / timings[name].median, peak)


def build(config: ViTConfig, name: str) -> nn.Module:
    torch.manual_seed(0)
    if name in OURS:
        return VisionTransformer(config)
    return with_layers(config, partial(PEERS[name], config.width, config.mlp_dim))


def with_layers(config: ViTConfig, make: Callable[[int, int], nn.Module]) -> VisionTransformer:
    """Our transformer with other layers of as many experts and slots; ours are never built."""
    from dataclasses import replace

    assert config.moe is not None
    model = VisionTransformer(replace(config, moe=None))
    for index in config.moe_blocks:
        block = model.encoder.blocks[index]
        assert isinstance(block, Block)
        assert not isinstance(block.mlp, MoE)
        block.mlp = make(config.moe.num_experts, config.moe.slots_per_expert)
    return model


def train_step(module: nn.Module, x: torch.Tensor, optim: OptimSection) -> Callable[[], object]:
    module.train()
    optimizer = make_optimizer(module, optim)
    set_learning_rate(optimizer, 1e-5)
    release = Released(optimizer, module)
    inside = InBackward(optimizer, release) if optim.in_backward else None

    def step() -> None:
        release()
        module(x).square().mean().backward()
        if inside is None:
            optimizer.step()
        else:
            inside.finish()

    return step


if __name__ == "__main__":
    found = measure(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], float(sys.argv[5]))
    print(json.dumps(asdict(found)))
