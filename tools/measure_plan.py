"""Compare the planner's memory with the peak of real processes that train.

    python tools/measure_plan.py [--ranks 2] [--expert 2] [--shard 2] [--images 16]

Every rank is a process of this machine (gloo, float32, one thread). What a rank holds before it builds the model
(python, torch, the process group) is not counted; the peak is that of two AdamW steps, read from the kernel. The C
library is told to give freed memory back, which by itself it keeps in part: a quarter more than was needed.
"""

import argparse
import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from softmoe import parallel
from softmoe.budget.plan import Layout, Plan, Settings
from softmoe.models import MoEConfig, VisionTransformer, ViTConfig

MODEL = ViTConfig(
    image_size=128,
    patch_size=16,
    width=384,
    depth=6,
    mlp_dim=1536,
    heads=6,
    num_classes=100,
    moe=MoEConfig.of("soft", num_experts=32, slots_per_expert=2),
)


def resident(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise OSError(f"this kernel does not tell {name}")


def train(rank: int, wanted: argparse.Namespace, port: int, answers: list[tuple[int, int]]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=wanted.ranks)
    mesh = parallel.make_mesh(wanted.expert, wanted.shard)
    with parallel.building(mesh):
        small = VisionTransformer(ViTConfig(image_size=32, width=64, depth=2, mlp_dim=128, heads=2, moe=MODEL.moe))
    parallel.apply(small, mesh)
    step(small, torch.optim.AdamW(small.parameters(), foreach=True), torch.randn(2, 3, 32, 32))  # libraries, buffers
    before = resident("VmRSS")
    with parallel.building(mesh):
        model = VisionTransformer(MODEL)
    built = resident("VmHWM") - before
    parallel.apply(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak up to here
    for _ in range(2):
        step(model, optimizer, torch.randn(wanted.images, 3, *MODEL.image_shape))
    answers.append((built, resident("VmHWM") - before) if rank == 0 else (0, 0))
    dist.destroy_process_group()


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor) -> None:
    model(images).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 2), ("expert", 2), ("shard", 2), ("images", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    wanted = parser.parse_args()
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_TRIM_THRESHOLD_": "1000000"}  # of the ranks
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with processes.Manager() as manager:
        answers = manager.list()
        processes.spawn(train, (wanted, port, answers), nprocs=wanted.ranks)
        built, measured = max(answers)
    settings = Settings(wanted.images * wanted.ranks, activation_bytes=4)
    planned = Plan(MODEL, Layout(wanted.ranks, wanted.expert, wanted.shard), settings).memory()
    print(f"planned    {planned.peak / 1e6:8.1f} MB  {planned}")
    print(f"measured   {measured / 1e6:8.1f} MB, the plan is {planned.peak / measured - 1:+.1%}")
    print(f"building   {built / 1e6:8.1f} MB at most")


if __name__ == "__main__":
    main()
