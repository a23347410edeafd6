"""Let ranks own experts: two equal all-to-alls around the experts' own code.

Letters: N experts, E ranks that share them, S rows per expert and rank, D width.

Slots have the same shape on every rank and every step, so nothing has to be counted or agreed on: rank r sends the rows
of the experts of rank q to q, whatever router filled them.
"""

import math
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from softmoe.moe import Experts

HALVES_FROM = {"cuda": 1024}
"""By device: rows of an expert, from all ranks, from which on they are exchanged in two halves. With fewer, reading the
weights is what takes the time, and halves would read them twice."""


class OwnedExperts(Experts):
    """(N, S, D) -> (N, S, D) as `Experts`, of which each rank of `mesh` keeps and computes N/E.

    The parameters have the names and (as DTensors) the shapes of all N experts. Their gradient is that of the mean of
    the ranks' losses over `mesh`.
    """

    def __init__(self, whole: Experts, mesh: DeviceMesh):
        nn.Module.__init__(self)
        self.dim, self.hidden_dim, self.num_experts = whole.dim, whole.hidden_dim, whole.num_experts
        self.dropout, self.activation, self.identical_init = whole.dropout, whole.activation, whole.identical_init
        self.gelu = whole.gelu
        self.mesh = mesh
        self.ranks = mesh.size()
        assert self.num_experts % self.ranks == 0
        for name, parameter in whole.named_parameters(recurse=False):
            owned = nn.Parameter(own_slice(parameter.detach(), mesh), requires_grad=parameter.requires_grad)
            self.register_parameter(name, owned)

    def forward(self, x_NSD: Tensor) -> Tensor:
        if x_NSD.ndim != 3 or x_NSD.shape[0] != self.num_experts or x_NSD.shape[2] != self.dim:
            raise ValueError(
                f"expected slots of shape ({self.num_experts}, rows, {self.dim}), got {tuple(x_NSD.shape)}"
            )
        mine = self._mine()
        arriving = [self._exchange(part) for part in x_NSD.chunk(self._parts(x_NSD), dim=1)]
        leaving = [self._exchange(self._by_rank(Experts.forward(mine, self._by_expert(rows)))) for rows in arriving]
        return leaving[0] if len(leaving) == 1 else torch.cat(leaving, dim=1)

    def _parts(self, x_NSD: Tensor) -> int:
        """Exchange the rows in two halves, where that is worth it: one travels while experts work at the other."""
        return 2 if x_NSD.shape[1] * self.ranks >= HALVES_FROM.get(x_NSD.device.type, math.inf) else 1

    def _by_expert(self, received: Tensor) -> Tensor:
        """(N, S, D), this rank's experts' rows by the rank they came from -> (N/E, E*S, D)."""
        E, (N, S, D) = self.ranks, received.shape
        return received.view(E, N // E, S, D).transpose(0, 1).reshape(N // E, E * S, D)

    def _by_rank(self, y: Tensor) -> Tensor:
        """(N/E, E*S, D) -> (N, S, D), the rows of each rank together, to be sent back."""
        E, (n, rows, D) = self.ranks, y.shape
        return y.view(n, E, rows // E, D).transpose(0, 1).reshape(E * n, rows // E, D)

    def _exchange(self, rows: Tensor) -> Tensor:
        """Exchange equal parts: part q of axis 0 goes to rank q; what comes from rank q becomes part q. On CUDA the
        caller goes on at once, and whoever uses the result first waits for it."""
        part = [rows.shape[0] // self.ranks] * self.ranks
        return all_to_all_single_autograd(rows.contiguous(), part, part, (self.mesh, 0))

    def _mine(self) -> Experts:
        """Give the experts' own forward what it looks at, for this rank's experts."""
        weights: dict[str, Any] = {
            name: _DivideGradient.apply(cast(DTensor, parameter).to_local(), self.ranks)
            for name, parameter in self.named_parameters(recurse=False)
        }
        view = SimpleNamespace(
            num_experts=self.num_experts // self.ranks,
            dim=self.dim,
            dropout=self.dropout,
            gelu=self.gelu,
            training=self.training,
            **weights,
        )
        return cast(Experts, view)


def own_slice(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    """Cut this rank's part of a stacked tensor, in memory of its own, known to the others as a part of the whole."""
    part = whole.chunk(mesh.size())[mesh.get_local_rank()].clone()
    return DTensor.from_local(part, mesh, [Shard(0)], run_check=False)


class _DivideGradient(torch.autograd.Function):
    """The backward passes of all ranks add up in an expert: the sum of E losses, where their mean is wanted."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, by: int) -> Tensor:
        ctx.by = by
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] / ctx.by, None
