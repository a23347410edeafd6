"""N stacked matrices in few bits, and their product with float32 rows.

Letters: N matrices, S rows, K inputs, C outputs, Q panels of E = 64 outputs.

Only the storage is small: the arithmetic is float32 throughout, so the error is that of rounding each weight once.
int8 has one scale per matrix and output, which is its largest weight over 127. Products of bfloat16, which some
processors cannot do, do not occur.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from softmoe.inference import kernel
from softmoe.inference.kernel import PANEL

WEIGHTS = ("float32", "float16", "bfloat16", "int8", "int8_dynamic")
Weights = Literal["float32", "float16", "bfloat16", "int8", "int8_dynamic"]
Storage = Literal["float32", "float16", "bfloat16", "int8", "int8_dynamic", "mapped"]
"""What commands offer: also float32 left in its file, for models larger than the memory (see mapped.py)."""


class PackedLinear(nn.Module):
    """(N, S, K) -> (N, S, C): x @ w + b, each matrix with its own rows. `get(n)` gives matrix n as (K, C).

    Matrices are asked for one at a time and once, so a stack that lies in a file is never in memory as a whole.
    """

    def __init__(self, get: Callable[[int], Tensor], shape: tuple[int, int, int], bias: Tensor, weights: Weights):
        super().__init__()
        kernel.KERNEL.why_not()  # built now, not while a compiler traces the first call
        N, K, C = self.shape = shape
        Q = -(-C // PANEL)
        dtype: torch.dtype = getattr(torch, weights)
        packed_NQKE = torch.zeros(N, Q, K, PANEL, dtype=dtype, device=bias.device)
        scale_NC = torch.ones(N, C, device=bias.device) if weights == "int8" else None
        for n in range(N):
            rounded_KC, scale_C = round_to(get(n).detach().float(), dtype)
            if scale_NC is not None and scale_C is not None:
                scale_NC[n] = scale_C
            whole = C // PANEL * PANEL
            packed_NQKE[n, : C // PANEL] = rounded_KC[:, :whole].unflatten(1, (-1, PANEL)).transpose(0, 1)
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
        x_NSK = x_NSK.float()
        if x_NSK.device.type == "cpu" and kernel.KERNEL.available:
            return kernel.packed_product(x_NSK, self.packed, self.scale, self.bias)
        return self.one_by_one(x_NSK)

    def one_by_one(self, x_NSK: Tensor) -> Tensor:
        """The same by torch: each matrix becomes float32 in one buffer, is used, and gives way to the next."""
        N, K, C = self.shape
        buffer_QKE = torch.empty(self.packed.shape[1:], device=x_NSK.device)
        outputs = []
        for n in range(N):
            buffer_QKE.copy_(self.packed[n])
            y_SC = (x_NSK[n] @ buffer_QKE).transpose(0, 1).flatten(1)[:, :C]
            outputs.append(
                torch.addcmul(self.bias[n], y_SC, self.scale[n]) if self.scale is not None else y_SC + self.bias[n]
            )
        return torch.stack(outputs)

    def matrix(self, n: int) -> Tensor:
        """(K, C): matrix n as it is used, after rounding."""
        w_KC = self.packed[n].float().transpose(0, 1).flatten(1)[:, : self.shape[2]]
        return w_KC if self.scale is None else w_KC * self.scale[n]

    def extra_repr(self) -> str:
        N, K, C = self.shape
        return f"{K}, {C}, matrices={N}, weights={self.packed.dtype}".replace("torch.", "")


def round_to(w_KC: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The weights in `dtype`, and for int8 the scale of each output. ValueError for what it cannot hold."""
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
    # a scale may round to zero if all weights are next to nothing; such weights are nothing
    scale_C = torch.where(scale_C > 0, scale_C, 1.0)
    return (w_KC / scale_C).round().clamp(-127, 127).to(torch.int8), scale_C


def refuse_gradients(x: Tensor) -> None:
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError("a prepared model gives no gradients: use the original one, or torch.no_grad()")
