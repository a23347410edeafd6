"""The least time of a Soft MoE layer's forward pass on a device, stage by stage: `python tools/layer_roofline.py`.

Letters: B images, M tokens, D width, H hidden width, N experts of one slot each.

Computed from the data sheet, not measured: each stage takes the longer of its products at the peak rate and its bytes
at the memory's, nothing is kept in a cache between stages, and launching takes no time. Real kernels reach a part.
"plain" counts torch's own passes (normalized tokens in float32, both softmaxes stored and cast, slots copied into the
experts' order, bias and activation as a pass), "kernels" those of the Triton backend.
"""

from dataclasses import dataclass

from softmoe.budget.plan import DEVICES, Hardware

SIZES = {"S/16, 128 experts": (196, 384, 1536, 128), "B/16, 128 experts": (196, 768, 3072, 128),
         "H/14, 256 experts": (256, 1280, 5120, 256)}  # fmt: skip
BATCHES = (8, 64, 256, 1024)


@dataclass(frozen=True)
class Stage:
    """FLOPs and bytes of one pass over memory. Float32 products run at half of bfloat16's rate (TF32)."""

    name: str
    moved: float
    flops: float = 0.0
    float32: bool = False

    def seconds(self, device: Hardware) -> float:
        rate = device.flops / 2 if self.float32 else device.flops
        return max(self.flops / rate, self.moved / device.memory_rate)


def stages(B: int, M: int, D: int, H: int, N: int, *, kernels: bool) -> list[Stage]:
    """Numbers are bfloat16 (2 bytes), logits and weights of the softmaxes float32 (4 bytes)."""
    tokens, slots, hidden, logits, weights = B * M * D, B * N * D, B * N * H, B * M * N, N * D * H
    mix, expert = 2 * logits * D, 2 * hidden * D
    if kernels:
        return [
            Stage("logits", 2 * tokens + 4 * logits, mix, float32=True),
            Stage("sums of both softmaxes", 8 * logits),
            Stage("dispatch", 4 * logits + 2 * tokens + 2 * slots, mix),
            Stage("first product, GELU", 2 * slots + 2 * weights + 2 * hidden, expert),
            Stage("second product", 2 * hidden + 2 * weights + 2 * slots, expert),
            Stage("combine", 4 * logits + 2 * slots + 2 * tokens, mix),
        ]
    return [
        Stage("normalized tokens", 6 * tokens),
        Stage("logits", 4 * tokens + 4 * logits, mix, float32=True),
        Stage("both softmaxes", 16 * logits),
        Stage("casts of both", 12 * logits),
        Stage("dispatch", 2 * logits + 2 * tokens + 2 * slots, mix),
        Stage("slots to experts", 4 * slots),
        Stage("first product", 2 * slots + 2 * weights + 2 * hidden, expert),
        Stage("bias and GELU", 4 * hidden),
        Stage("second product", 2 * hidden + 2 * weights + 2 * slots, expert),
        Stage("slots to images", 4 * slots),
        Stage("combine", 2 * logits + 2 * slots + 2 * tokens, mix),
    ]


def seconds(device: Hardware, passes: list[Stage]) -> float:
    return sum(stage.seconds(device) for stage in passes)


def share_of_peak(device: Hardware, passes: list[Stage]) -> float:
    return sum(stage.flops for stage in passes) / device.flops / seconds(device, passes)


def table() -> list[str]:
    """Markdown: microseconds of a layer's forward pass and the share of the peak, plain and by kernels."""
    lines = [
        "| layer | device | images | plain, µs | kernels, µs | plain, share of peak | kernels, share of peak |",
        "|---|---|---|---|---|---|---|",
    ]
    for size, shape in SIZES.items():
        for name in ("a100-80", "h100"):
            for batch in BATCHES:
                device = DEVICES[name]
                plain, kernels = (stages(batch, *shape, kernels=k) for k in (False, True))
                times = " | ".join(f"{1e6 * seconds(device, p):,.0f}" for p in (plain, kernels))
                shares = " | ".join(f"{share_of_peak(device, p):.0%}" for p in (plain, kernels))
                lines.append(f"| {size} | {name} | {batch} | {times} | {shares} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
