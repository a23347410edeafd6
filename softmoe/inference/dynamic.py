"""Products of bytes with bytes: int8 weights, and rows rounded to 256 steps as they come.

Letters: N matrices, S rows, K inputs (in groups of F = 4), C outputs, Q panels of E = 64 outputs.

Several times as fast as float32 at any batch size on processors that have the instruction (AVX-512 VNNI), for another
rounding about as large as that of the weights. Dense layers of the blocks are done the same way as experts.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from softmoe.inference import kernel
from softmoe.inference.kernel import PANEL
from softmoe.inference.packed import refuse_gradients, round_to


class ByteLinear(nn.Module):
    """(N, S, K) -> (N, S, C): x @ w + b, each matrix with its own rows. `get(n)` gives matrix n as (K, C)."""

    def __init__(self, get: Callable[[int], Tensor], shape: tuple[int, int, int], bias: Tensor):
        super().__init__()
        if bias.device.type != "cpu" or not kernel.has_bytes():
            why = kernel.KERNEL.why_not() or "this processor (or device) has no product of bytes"
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
        if short:  # with the row's own last number: zeros might widen its range; their weights are zero
            x_NSK = torch.cat([x_NSK, x_NSK[..., -1:].expand(-1, -1, short)], -1)
        return kernel.byte_product(x_NSK, self.packed, self.scale, self.sums, self.bias)

    def matrix(self, n: int) -> Tensor:
        """(K, C): matrix n as it is used, after rounding."""
        _, K, C = self.shape
        return self.packed[n].permute(1, 3, 0, 2).flatten(2).flatten(0, 1)[:K, :C] * self.scale[n]

    def extra_repr(self) -> str:
        N, K, C = self.shape
        return f"{K}, {C}, matrices={N}"


class ByteDense(nn.Module):
    """The same where an nn.Linear stood: (..., K) -> (..., C)."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        K, C = linear.in_features, linear.out_features
        bias = torch.zeros(C) if linear.bias is None else linear.bias
        self.stack = ByteLinear(lambda _: linear.weight.T, (1, K, C), bias.unsqueeze(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.stack(x.flatten(0, -2).unsqueeze(0)).view(*x.shape[:-1], self.stack.shape[2])
