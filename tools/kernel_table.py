"""Compile the Triton kernels for GPUs that need not be there: `python tools/kernel_table.py` makes docs/gpu.md's table.

Prints registers of a thread, spilled bytes, and shared memory of a block, at the sizes of the paper's models. Each
launch is made by the very functions that the techniques call, on tensors without memory; it is recorded, not run.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from softmoe.accelerate.kernels import adamw, product, soft

SIZES = {"S/16": (196, 384, 1536, 128), "B/16": (196, 768, 3072, 128), "L/16": (196, 1024, 4096, 128),
         "H/14": (256, 1280, 5120, 256)}  # fmt: skip
"""M tokens at 224 pixels, D width, H hidden width, N experts of one slot each (the paper's tables)."""
NUMBERS = {"bfloat16": (torch.bfloat16, True), "float32": (torch.float32, True), "exact": (torch.float32, False)}
"""By precision of a run: the type of the numbers, and whether products of float32 are TF32's."""
CAPABILITIES = {"sm_80": 80, "sm_90": 90}
LARGEST_SHARED = {"sm_80": 163, "sm_90": 227}
"""KiB that a block may have."""
_POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.bool: "*i1", torch.int32: "*i32"}
_KERNELS = (
    (soft, ("logits_kernel", "log_sum_exp_kernel", "mix_kernel", "logits_gradient_kernel")),
    (product, ("product_kernel",)),
    (adamw, ("adamw_kernel",)),
)


class Launch(NamedTuple):
    """One launch of a kernel: who asked for it, and all that decides what is compiled."""

    what: str
    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    multiples: tuple[str, ...]
    """Arguments that are known to be multiples of 16: pointers, and sizes that happen to be."""
    warps: int


class Usage(NamedTuple):
    registers: int
    spilled: int
    shared: int


def launches(M: int, D: int, H: int, N: int, dtype: torch.dtype, *, B: int = 64) -> list[Launch]:
    """List the kernels that one layer of that size, and the update of its weights, ask for in both passes."""
    found: list[Launch] = []

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x, slots, logits = empty(B, M, D), empty(N, B, D), empty(B, M, N, dtype=torch.float32)
    by_slot, by_token = empty(B, N, dtype=torch.float32), empty(B, M, dtype=torch.float32)
    with _recorded(found) as doing:
        for mask in (None, empty(B, M, dtype=torch.bool)):
            masked = "" if mask is None else ", mask"
            doing("dispatch" + masked)
            soft.to_slots(logits, by_slot, mask, x, 1, over_tokens=True)
            doing("combine" + masked)
            soft.to_tokens(logits, by_token, mask, slots, over_tokens=False)
        doing("dispatch, gradient of tokens")
        soft.to_tokens(logits, by_slot, None, slots, over_tokens=True)
        doing("combine, gradient of slots")
        soft.to_slots(logits, by_token, None, x, 1, over_tokens=False)
        doing("dispatch, gradient of logits")
        soft.logits_gradient(logits, by_slot, by_slot, None, x, slots, over_tokens=True)
        doing("combine, gradient of logits")
        soft.logits_gradient(logits, by_token, by_token, None, x, slots, over_tokens=False)
        doing("log-sum-exp over tokens")
        soft.log_sum_exp(logits, None, over_tokens=True)
        doing("logits")
        soft.logits(x, empty(D, N, dtype=torch.float32), True, 1e-6)
        doing("log-sum-exp over slots")
        soft.log_sum_exp(logits, None, over_tokens=False)
        for rows in (8, 64):
            slots, hidden, w = empty(N, rows, D), empty(N, rows, H), empty(N, D, H)
            doing(f"experts, first product and GELU, {rows} rows")
            product.product_gelu(slots, w, empty(N, H), True)
            doing(f"experts, second product, {rows} rows")
            product.product(hidden, w.transpose(1, 2), empty(N, D))
            doing(f"experts, gradient of hidden rows, {rows} rows")
            product.product_gelu_backward(slots, w, hidden)
        doing("AdamW")
        weight, moment = (empty(N * D * H, dtype=t) for t in (torch.float32, torch.bfloat16))
        step, noise = empty(dtype=torch.float32), empty(1, dtype=torch.int32)
        settings = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
        adamw.update(weight, weight, moment, moment, step, step, noise, 7, 1 << 20, 1 << 12, settings)
    return found


@contextmanager
def _recorded(found: list[Launch]) -> Iterator[Callable[[str], None]]:
    now = [""]

    class Recorder:
        def __init__(self, kernel: Any):
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *arguments, **named: found.append(_launch(now[0], self.kernel, arguments, named))

    kept = [(module, name, getattr(module, name)) for module, names in _KERNELS for name in names]
    try:
        for module, name, kernel in kept:
            setattr(module, name, Recorder(kernel))
        yield lambda what: now.__setitem__(0, what)
    finally:
        for module, name, kernel in kept:
            setattr(module, name, kernel)


def _launch(what: str, kernel: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Launch:
    """As triton sees arguments when it launches: a 1 or None is a constant, a multiple of 16 is known to be one."""
    signature, constants, multiples = [], [], []
    warps = named.pop("num_warps")
    for parameter, value in zip(kernel.params, (*arguments, *named.values()), strict=True):
        name = parameter.name
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature.append((name, "constexpr"))
            constants.append((name, value))
            continue
        if isinstance(value, Tensor):
            kind = _POINTERS[value.dtype]
        else:
            kind = "fp32" if isinstance(value, float) else "i64" if value >= 1 << 31 else "i32"
        signature.append((name, kind))
        if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
            multiples.append(name)
    assert list(named) == [p.name for p in kernel.params[len(arguments) :]], "named in another order than declared"
    return Launch(what, kernel, tuple(signature), tuple(constants), tuple(multiples), warps)


def usage(launch: Launch, capability: str) -> Usage:
    """Compile, and ask what the machine code takes."""
    places = {p.name: (i,) for i, p in enumerate(launch.kernel.params)}
    source = ASTSource(
        fn=launch.kernel,
        signature=dict(launch.signature),
        constexprs={places[name]: value for name, value in launch.constants},
        attrs={places[name]: [["tt.divisibility", 16]] for name in launch.multiples},
    )
    target = GPUTarget("cuda", CAPABILITIES[capability], 32)
    compiled = triton.compile(source, target=target, options={"enable_fp_fusion": True, "num_warps": launch.warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        said = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    line = next(line for line in said.stdout.splitlines() if "REG:" in line)
    facts = dict(part.split(":") for part in line.split() if ":" in part)
    return Usage(int(facts["REG"]), int(facts["STACK"]) + int(facts["LOCAL"]), compiled.metadata.shared)


def table(sizes: dict[str, tuple[int, int, int, int]] = SIZES) -> list[str]:
    """Markdown: a row for each launch; types and sizes that compile to the same code share one."""
    rows: dict[Launch, tuple[dict[str, None], dict[str, None]]] = {}
    for numbers, (dtype, tf32) in NUMBERS.items():
        torch.backends.cuda.matmul.allow_tf32 = tf32
        for size, shape in sizes.items():
            for launch in launches(*shape, dtype):
                types, names = rows.setdefault(launch, ({}, {}))
                types[numbers] = names[size] = None
    named = list(CAPABILITIES)
    targets = ", ".join(named)
    lines = [
        f"| kernel | numbers | sizes | registers, {targets} | spilled bytes | shared KiB, {targets} |",
        "|---|---|---|---|---|---|",
    ]
    for launch, (types, names) in rows.items():
        found = [usage(launch, capability) for capability in named]
        registers, spilled, shared = zip(*found, strict=True)
        lines.append(
            f"| {launch.what} | {', '.join(types)} | {', '.join(names)} | {', '.join(map(str, registers))} | "
            f"{', '.join(map(str, spilled))} | {', '.join(f'{size / 1024:.0f}' for size in shared)} |"
        )
    return lines


if __name__ == "__main__":
    assert not knobs.runtime.interpret, "TRITON_INTERPRET=1 leaves nothing to compile"
    print("\n".join(table({name: SIZES[name] for name in sys.argv[1:]} or SIZES)))
