"""Routers and experts for inference only: slot vectors normalized once, weights stored in few bits.

Letters: B images, M tokens, D width, N experts or matrices, P slots per expert, H hidden width, S slots or rows,
K inputs (in groups of F = 4 for bytes), C outputs, Q panels of E = 64 outputs.

There are two kinds of stacked linear layers. `PackedLinear` only stores its weights in few bits: on a CPU it computes
in float32, so the error is that of rounding each weight once. On other devices rows are rounded to the type of the
weights (bfloat16 for int8) and multiplied in it. `ByteLinear` also rounds the rows to 256 steps and multiplies bytes
with bytes: several times as fast where the processor can (AVX-512 VNNI), for another rounding error about as large.
int8 has one scale per matrix and output, its largest weight over 127.

The kernels of both are in packed.cpp; without it torch computes the same more slowly.
"""

import ctypes
from collections.abc import Callable
from functools import cache, partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from softmoe.accelerate.build import Kernel, call
from softmoe.moe import DenseRouting, Experts, Router, SoftRouter
from softmoe.moe.experts import check_slots, make_gelu
from softmoe.moe.routing import check_tokens, no_autocast, routing_dtype
from softmoe.moe.soft import EPS, l2_normalize, softmax_over_slots, softmax_over_tokens

WEIGHTS = ("float32", "float16", "bfloat16", "int8", "int8_dynamic")
Weights = Literal["float32", "float16", "bfloat16", "int8", "int8_dynamic"]
Storage = Literal["float32", "float16", "bfloat16", "int8", "int8_dynamic", "mapped"]
"""The names that commands offer; `mapped` is float32 left in its file, for models larger than the memory."""
GROUP = 1 << 28
"""Bytes of weights that are unpacked at a time without the compiled kernel."""
PANEL = 64  # outputs that lie side by side in the packed weights, as in packed.cpp
_NAMES = {
    torch.float32: "product_float32",
    torch.float16: "product_float16",
    torch.bfloat16: "product_bfloat16",
    torch.int8: "product_int8",
}


class PreparedSoftRouter(Router):
    """Routes like `SoftRouter` in evaluation mode, with slot vectors that were normalized and scaled once.

    Tokens are normalized by dividing their logits by their length.
    """

    def __init__(self, router: SoftRouter):
        super().__init__(router.dim, router.num_experts)
        self.slots_per_expert = router.slots_per_expert
        self.normalize = router.scale is not None
        with torch.no_grad():
            slots_DS = router.phi.to(routing_dtype(router.phi.dtype)).flatten(1)
            if router.scale is not None:
                slots_DS = l2_normalize(slots_DS, dim=0) * router.scale.to(slots_DS.dtype)
        if not slots_DS.isfinite().all():
            raise ValueError("its slot vectors are not finite numbers")
        self.slots: Tensor
        self.register_buffer("slots", slots_DS.clone())

    def forward(self, x_BMD: Tensor, mask: Tensor | None = None) -> DenseRouting:
        check_tokens(x_BMD, mask, self.dim)
        with no_autocast(x_BMD):
            tokens_BMD = x_BMD.to(self.slots.dtype)
            logits_BMS = tokens_BMD @ self.slots
            if self.normalize:
                logits_BMS = logits_BMS * torch.rsqrt(tokens_BMD.square().sum(-1, keepdim=True) + EPS)
        logits_BMNP = logits_BMS.unflatten(2, (self.num_experts, self.slots_per_expert))
        return DenseRouting(softmax_over_tokens(logits_BMNP, mask), softmax_over_slots(logits_BMNP, mask))

    def extra_repr(self) -> str:
        return f"{self.dim}, num_experts={self.num_experts}, slots_per_expert={self.slots_per_expert}"


class PreparedExperts(nn.Module):
    """Computes like `Experts` in evaluation mode, (N, S, D) -> (N, S, D), from weights of fewer bits."""

    def __init__(self, experts: Experts, weights: Weights):
        super().__init__()
        N, D, H = experts.num_experts, experts.dim, experts.hidden_dim
        self.dim, self.hidden_dim, self.num_experts = D, H, N
        self.activation = experts.activation
        self.gelu = make_gelu(experts.activation)
        linear = ByteLinear if weights == "int8_dynamic" else partial(PackedLinear, weights=weights)
        self.first = linear(lambda n: experts.w1[n], (N, D, H), experts.b1)
        self.second = linear(lambda n: experts.w2[n].T, (N, H, D), experts.b2)

    def forward(self, x_NSD: Tensor) -> Tensor:
        check_slots(x_NSD, self.num_experts, self.dim)
        active_NSH = self.gelu(self.first(x_NSD))
        return self.second(active_NSH)


class PackedLinear(nn.Module):
    """Computes x @ w + b, (N, S, K) -> (N, S, C), each matrix with its own rows. `get(n)` returns matrix n as (K, C).

    `get` is called once for each matrix, so a stack that is mapped from a file is never in memory as a whole. On a CPU
    matrices are stored in panels, as the compiled kernel reads them; elsewhere a panel is as wide as a matrix.
    """

    def __init__(self, get: Callable[[int], Tensor], shape: tuple[int, int, int], bias: Tensor, weights: Weights):
        super().__init__()
        N, K, C = self.shape = shape
        on_cpu = bias.device.type == "cpu"
        if on_cpu:
            KERNEL.why_not()  # build it now, not while torch.compile traces the first call
        E = PANEL if on_cpu else C
        dtype: torch.dtype = getattr(torch, weights)
        packed_NQKE = torch.zeros(N, -(-C // E), K, E, dtype=dtype, device=bias.device)
        scale_NC = torch.ones(N, C, device=bias.device) if weights == "int8" else None
        for n in range(N):
            rounded_KC, scale_C = round_to(get(n).detach().float(), dtype)
            if scale_NC is not None and scale_C is not None:
                scale_NC[n] = scale_C
            whole = C // E * E
            packed_NQKE[n, : C // E] = rounded_KC[:, :whole].unflatten(1, (-1, E)).transpose(0, 1)
            if whole < C:
                packed_NQKE[n, -1, :, : C - whole] = rounded_KC[:, whole:]
        self.packed: Tensor
        self.scale: Tensor | None
        self.bias: Tensor
        self.register_buffer("packed", packed_NQKE)
        self.register_buffer("scale", scale_NC)
        self.register_buffer("bias", bias.detach().float().clone())

    def forward(self, x_NSK: Tensor) -> Tensor:
        refuse_gradients(x_NSK)
        if x_NSK.device.type == "cpu" and KERNEL.available:
            return packed_product(x_NSK.float(), self.packed, self.scale, self.bias)
        return self.by_groups(x_NSK)

    def by_groups(self, x_NSK: Tensor) -> Tensor:
        """Compute with torch, in groups of matrices that take GROUP bytes in the type of the products."""
        N, K, C = self.shape
        dtype = product_dtype(self.packed.dtype, x_NSK.device)
        needs_no_copy = self.packed.dtype == dtype and self.packed.shape[1] == 1
        count = N if needs_no_copy else max(1, GROUP // (K * C * dtype.itemsize))
        products = []
        for first in range(0, N, count):
            group_NKC = self.packed[first : first + count].transpose(1, 2).to(dtype).flatten(2)[..., :C]
            products.append(torch.bmm(x_NSK[first : first + count].to(dtype), group_NKC))
        y_NSC = torch.cat(products).float()
        bias_N1C = self.bias.unsqueeze(1)
        return y_NSC + bias_N1C if self.scale is None else torch.addcmul(bias_N1C, y_NSC, self.scale.unsqueeze(1))

    def matrix(self, n: int) -> Tensor:
        """Return matrix n, (K, C), as it is used, after rounding."""
        w_KC = self.packed[n].float().transpose(0, 1).flatten(1)[:, : self.shape[2]]
        return w_KC if self.scale is None else w_KC * self.scale[n]

    def extra_repr(self) -> str:
        N, K, C = self.shape
        return f"{K}, {C}, matrices={N}, weights={self.packed.dtype}".replace("torch.", "")


class ByteLinear(nn.Module):
    """Computes like `PackedLinear`, by products of int8 with int8."""

    def __init__(self, get: Callable[[int], Tensor], shape: tuple[int, int, int], bias: Tensor):
        super().__init__()
        if bias.device.type != "cpu" or not has_bytes():
            why = KERNEL.why_not() or "this processor (or device) has no product of bytes"
            raise ValueError(f"int8_dynamic needs the compiled product and AVX-512 VNNI, but {why}; use int8")
        N, K, C = self.shape = shape
        groups, Q = -(-K // 4), -(-C // PANEL)
        packed = torch.zeros(N, Q, groups, PANEL, 4, dtype=torch.int8)
        scale_NC, sums_NC = torch.empty(N, C), torch.empty(N, C)
        for n in range(N):
            rounded_KC, scale_C = round_to(get(n).detach().float(), torch.int8)
            assert scale_C is not None
            scale_NC[n], sums_NC[n] = scale_C, rounded_KC.sum(0)
            padded_KC = F.pad(rounded_KC, (0, Q * PANEL - C, 0, 4 * groups - K))
            packed[n] = padded_KC.view(groups, 4, Q, PANEL).permute(2, 0, 3, 1)
        self.packed: Tensor
        self.scale: Tensor
        self.sums: Tensor
        self.bias: Tensor
        self.register_buffer("packed", packed)
        self.register_buffer("scale", scale_NC)
        self.register_buffer("sums", sums_NC)
        self.register_buffer("bias", bias.detach().float().clone())

    def forward(self, x_NSK: Tensor) -> Tensor:
        refuse_gradients(x_NSK)
        short = -self.shape[1] % 4
        x_NSK = x_NSK.float()
        if short:  # pad with the row's last number, since zeros might widen its range; the weights there are zero
            x_NSK = torch.cat([x_NSK, x_NSK[..., -1:].expand(-1, -1, short)], -1)
        return byte_product(x_NSK, self.packed, self.scale, self.sums, self.bias)

    def matrix(self, n: int) -> Tensor:
        """Return matrix n, (K, C), as it is used, after rounding."""
        _, K, C = self.shape
        return self.packed[n].permute(1, 3, 0, 2).flatten(2).flatten(0, 1)[:K, :C] * self.scale[n]

    def extra_repr(self) -> str:
        N, K, C = self.shape
        return f"{K}, {C}, matrices={N}"


class ByteDense(nn.Module):
    """Replaces an nn.Linear, (..., K) -> (..., C), by products of bytes."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        K, C = linear.in_features, linear.out_features
        bias = torch.zeros(C) if linear.bias is None else linear.bias
        self.stack = ByteLinear(lambda _: linear.weight.T, (1, K, C), bias.unsqueeze(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.stack(x.flatten(0, -2).unsqueeze(0)).view(*x.shape[:-1], self.stack.shape[2])


def product_dtype(stored: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the type in which torch multiplies: float32 on a CPU, elsewhere the stored one, or bfloat16 for bytes."""
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if stored == torch.int8 else stored


def round_to(w_KC: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return the weights in `dtype`, and for int8 the scale of each output. ValueError for weights it cannot hold."""
    if not w_KC.isfinite().all():
        raise ValueError("it has weights that are not finite numbers")
    if dtype != torch.int8:
        rounded_KC = w_KC.to(dtype)
        if not rounded_KC.isfinite().all():
            raise ValueError(
                f"it has weights up to {w_KC.abs().max():.3g}, which {dtype} cannot hold".replace("torch.", "")
            )
        return rounded_KC, None
    largest_C = w_KC.abs().amax(0)
    scale_C = torch.where(largest_C > 0, largest_C, 127.0) / 127.0
    # a scale underflows to zero if all weights are tiny; they then become zero
    scale_C = torch.where(scale_C > 0, scale_C, 1.0)
    return (w_KC / scale_C).round().clamp(-127, 127).to(torch.int8), scale_C


def refuse_gradients(x: Tensor) -> None:
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError("a prepared model gives no gradients: use the original one, or torch.no_grad()")


def self_test(library: ctypes.CDLL) -> bool:
    """Compare the kernel with torch on small whole numbers, which are exact in every type."""
    x = torch.arange(3 * 7 * 5).remainder(9).view(3, 7, 5).float() - 4
    w = torch.arange(3 * 2 * 5 * PANEL).remainder(11).view(3, 2, 5, PANEL).float() - 5
    bias = torch.arange(3 * 70).remainder(3).view(3, 70).float()
    plain = x @ w.transpose(1, 2).reshape(3, 5, 2 * PANEL)[..., :70] + bias.unsqueeze(1)
    return all(torch.equal(product(library, x, w.to(dtype), None, bias), plain) for dtype in _NAMES)


def product(
    library: ctypes.CDLL, x_NSK: Tensor, packed_NQKE: Tensor, scale_NC: Tensor | None, bias_NC: Tensor
) -> Tensor:
    N, S, K = x_NSK.shape
    C = bias_NC.shape[1]
    assert packed_NQKE.shape == (N, -(-C // PANEL), K, PANEL)
    assert x_NSK.dtype == bias_NC.dtype == torch.float32
    assert scale_NC is None or scale_NC.shape == bias_NC.shape
    assert all(t is None or t.is_contiguous() for t in (x_NSK, packed_NQKE, scale_NC, bias_NC))
    y_NSC = torch.empty(N, S, C)
    function = getattr(library, _NAMES[packed_NQKE.dtype])
    call(function, x_NSK, packed_NQKE, scale_NC, bias_NC, y_NSC, N, S, K, C)
    return y_NSC


KERNEL = Kernel("packed", self_test)


@torch.library.custom_op("softmoe::packed_product", mutates_args=(), device_types="cpu")
def packed_product(x_NSK: Tensor, packed_NQKE: Tensor, scale_NC: Tensor | None, bias_NC: Tensor) -> Tensor:
    """Compute (x @ w) * scale + bias for weights in panels, as an operator that torch.compile can trace."""
    return product(KERNEL.library, x_NSK.contiguous(), packed_NQKE, scale_NC, bias_NC)


@cache
def has_bytes() -> bool:
    """Tell if the processor multiplies bytes (AVX-512 VNNI)."""
    if not KERNEL.available:
        return False
    x, w, ones = torch.zeros(1, 1, 4), torch.zeros(1, 1, 4 * PANEL, dtype=torch.int8), torch.ones(1, 1)
    return _call_bytes(x, w, ones, ones, ones) is not None


def _call_bytes(x_NSK: Tensor, packed: Tensor, scale_NC: Tensor, sums_NC: Tensor, bias_NC: Tensor) -> Tensor | None:
    N, S, K = x_NSK.shape
    C = bias_NC.shape[1]
    assert packed.numel() == N * -(-C // PANEL) * PANEL * K
    assert K % 4 == 0
    tensors = (x_NSK, packed, scale_NC, sums_NC, bias_NC)
    assert all(t.is_contiguous() for t in tensors)
    y_NSC = torch.empty(N, S, C)
    workspace = (torch.empty(N, S, K, dtype=torch.uint8), torch.empty(N, S, 2))
    done = call(KERNEL.library.product_bytes, *tensors, y_NSC, *workspace, N, S, K, C)
    return y_NSC if done else None


@torch.library.custom_op("softmoe::byte_product", mutates_args=(), device_types="cpu")
def byte_product(x_NSK: Tensor, packed: Tensor, scale_NC: Tensor, sums_NC: Tensor, bias_NC: Tensor) -> Tensor:
    """Compute packed_product for int8 weights, with every row of x rounded to bytes too."""
    y_NSC = _call_bytes(x_NSK.contiguous(), packed, scale_NC, sums_NC, bias_NC)
    assert y_NSC is not None, "this processor has no such product"
    return y_NSC


@byte_product.register_fake
def _(x_NSK: Tensor, packed: Tensor, scale_NC: Tensor, sums_NC: Tensor, bias_NC: Tensor) -> Tensor:
    return x_NSK.new_empty(x_NSK.shape[0], x_NSK.shape[1], bias_NC.shape[1])


@packed_product.register_fake
def _(x_NSK: Tensor, packed_NQKE: Tensor, scale_NC: Tensor | None, bias_NC: Tensor) -> Tensor:
    return x_NSK.new_empty(x_NSK.shape[0], x_NSK.shape[1], bias_NC.shape[1])
