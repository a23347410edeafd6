"""The arithmetic and memory traffic of a step, for its roofline. Only what no implementation can avoid is counted.

Letters: B images, M tokens, D width, H hidden width, N experts, P slots per expert.
"""

from dataclasses import dataclass

WORD = 4  # bytes of a float32


@dataclass(frozen=True)
class Work:
    """Of a forward pass: multiply-accumulates, parameters read once, and numbers that go in and come out."""

    macs: float
    params: float
    in_out: float

    def forward(self) -> tuple[float, float]:
        """(FLOPs, bytes)"""
        return 2 * self.macs, WORD * (self.params + self.in_out)

    def train(self) -> tuple[float, float]:
        """(FLOPs, bytes) of forward, backward and AdamW.

        Parameters are read by the forward and the backward pass and the gradient is written (3 words); AdamW reads
        parameter, gradient and two moments and writes all but the gradient (7 words). Inputs, outputs and their
        gradients cross memory once each.
        """
        return 6 * self.macs, WORD * (10 * self.params + 2 * self.in_out)


def soft_layer(B: int, M: int, D: int, H: int, N: int, P: int) -> Work:
    routing = 3 * M * D * N * P
    experts = 2 * N * P * D * H
    return Work(B * (routing + experts), N * (2 * D * H + H + D) + D * N * P + 1, 2 * B * M * D)


def sparse_layer(B: int, M: int, D: int, H: int, N: int, capacity: int) -> Work:
    """One image a group: the gate, and every slot through its expert."""
    return Work(B * (M * D * N + 2 * N * capacity * D * H), N * (2 * D * H + H + D) + D * N, 2 * B * M * D)


def mlp(rows: int, D: int, H: int) -> Work:
    return Work(2 * rows * D * H, 2 * D * H + H + D, 2 * rows * D)
