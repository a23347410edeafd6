"""Let ranks own experts: two equal all-to-alls around the experts' own code.

Letters: N experts, E ranks that share them, S rows per expert and rank, D width.

Slots have the same shape on every rank and every step, so nothing has to be counted or agreed on: rank r sends the rows
of the experts of rank q to q, whatever router filled them.

Where there are many rows they go in two halves: in both passes one half travels while experts work at the other.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from softmoe.moe import Experts
from softmoe.moe.experts import check_slots, normal_, xavier_uniform_

HALVES_FROM = {"cuda": 1024}
"""By device: rows of an expert, from all ranks, from which on they are exchanged in two halves. With fewer, reading the
weights is what takes the time, and halves would read them twice."""


class OwnedExperts(Experts):
    """Computes (N, S, D) -> (N, S, D) as `Experts`, of which each rank of `mesh` keeps N/E.

    The parameters have the names and (as DTensors) the shapes of all N experts. Their gradient is that of the mean of
    the ranks' losses over `mesh`.
    """

    def __init__(self, whole: Experts, mesh: DeviceMesh):
        nn.Module.__init__(self)
        self.dim, self.hidden_dim, self.num_experts = whole.dim, whole.hidden_dim, whole.num_experts
        self.dropout, self.activation, self.identical_init = whole.dropout, whole.activation, whole.identical_init
        self.gelu, self.zero_output = whole.gelu, whole.zero_output
        self.mesh = mesh
        self.ranks = mesh.size()
        assert self.num_experts % self.ranks == 0
        for name, parameter in whole.named_parameters(recurse=False):
            owned = nn.Parameter(own_slice(parameter.detach(), mesh), requires_grad=parameter.requires_grad)
            self.register_parameter(name, owned)

    def forward(self, x_NSD: Tensor) -> Tensor:
        check_slots(x_NSD, self.num_experts, self.dim)
        mine, halves = self._local_view(), range(self._parts(x_NSD))
        there, back = ([Exchange(self.mesh.get_group()) for _ in halves] for _ in range(2))
        arriving, leaving = _Depart.apply(x_NSD, there), []
        for half in halves:
            rows = self._by_expert(_Arrive.apply(arriving[half], there[half]))
            leaving.append(_Leave.apply(self._by_rank(Experts.forward(mine, rows)), back[half]))
        return _Return.apply(back, *leaving)

    def _parts(self, x_NSD: Tensor) -> int:
        """Return in how many parts rows are exchanged: two if one can travel while the other is computed."""
        rows, enough = x_NSD.shape[1], HALVES_FROM.get(x_NSD.device.type, math.inf)
        return 2 if rows > 1 and rows * self.ranks >= enough else 1

    def _by_expert(self, received: Tensor) -> Tensor:
        """Sort received rows by this rank's experts: (N, S, D), in the order of their ranks -> (N/E, E*S, D)."""
        E, (N, S, D) = self.ranks, received.shape
        return received.view(E, N // E, S, D).transpose(0, 1).reshape(N // E, E * S, D)

    def _by_rank(self, y: Tensor) -> Tensor:
        """Put the rows of each rank together to be sent back: (N/E, E*S, D) -> (N, S, D)."""
        E, (n, rows, D) = self.ranks, y.shape
        return y.view(n, E, rows // E, D).transpose(0, 1).reshape(E * n, rows // E, D)

    def _local_view(self) -> Experts:
        """Return an object with all that `Experts.forward` reads, of this rank's experts alone."""
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


def draw_part(
    experts: Experts, like: Mapping[str, Tensor], part_of: Callable[[torch.Size], tuple[slice, ...]]
) -> dict[str, Tensor]:
    """Draw initial values and keep a part of each parameter.

    `like` has the parameters by name, on the meta device; `part_of` returns the slices to keep of a shape (N, ...).
    Numbers and order are those of `Experts.reset_parameters`; no more than one expert is ever whole.
    """
    matrix = partial(xavier_uniform_, fan_in=experts.dim, fan_out=experts.hidden_dim)
    vector = partial(normal_, std=1e-6)
    drawn = 1 if experts.identical_init else experts.num_experts
    kept = {}
    for name, draw in (("w1", matrix), ("b1", vector), ("w2", matrix), ("b2", vector)):
        whole = like[name]
        rows, *rest = part_of(whole.shape)
        at_once = drawn if draw is vector else 1  # torch draws normal numbers in groups of 16: apart they would differ
        some = torch.empty(at_once, *whole.shape[1:], dtype=whole.dtype, device="cpu")
        mine = kept[name] = torch.empty(whole[rows, *rest].shape, dtype=whole.dtype, device="cpu")
        for first in range(0, drawn, at_once):
            draw(some)
            if experts.identical_init:
                mine[:] = some[:, *rest]
            for n in range(max(first, rows.start), min(first + at_once, rows.stop)):
                mine[n - rows.start] = some[n - first, *rest]
    return kept


class Exchange:
    """An all-to-all of rows in equal parts: part q of axis 0 goes to rank q, and what comes from q becomes part q."""

    def __init__(self, group: Any):
        self.group = group
        self.work: Any = None

    def begin(self, rows: Tensor) -> Tensor:
        """Start the exchange and return the memory that the rows arrive in; nobody may read it before `end`."""
        self.rows = rows.contiguous()
        received = torch.empty_like(self.rows)
        self.work = dist.all_to_all_single(received, self.rows, group=self.group, async_op=True)
        return received

    def end(self) -> None:
        """Wait until the exchange is done; on CUDA the device waits, not the host."""
        self.work.wait()
        self.work = self.rows = None


# The four steps of an exchange to the experts and back, in this order for each half. The backward of each is the
# forward of another, so the backward pass, which goes from the last half to the first, overlaps in the same way.


class _Depart(torch.autograd.Function):
    """Begin the exchange of each half."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchanges: list[Exchange]) -> tuple[Tensor, ...]:
        ctx.exchanges = exchanges
        parts = rows.chunk(len(exchanges), dim=1)
        return tuple(exchange.begin(part) for exchange, part in zip(exchanges, parts, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return joined(ctx.exchanges, gradients), None


class _Arrive(torch.autograd.Function):
    """End the exchange of a half that departed."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.end()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.begin(gradients[0]), None


class _Leave(torch.autograd.Function):
    """Begin the way back of a half."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.begin(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.end()
        return gradients[0].view_as(gradients[0]), None


class _Return(torch.autograd.Function):
    """End the way back of all halves."""

    @staticmethod
    def forward(ctx: Any, exchanges: list[Exchange], *parts: Tensor) -> Tensor:
        ctx.exchanges = exchanges
        return joined(exchanges, parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        parts = gradients[0].chunk(len(ctx.exchanges), dim=1)
        pairs = [*zip(ctx.exchanges, parts, strict=True)]
        return None, *reversed([exchange.begin(part) for exchange, part in reversed(pairs)])  # the last is needed first


def joined(exchanges: list[Exchange], parts: tuple[Tensor, ...]) -> Tensor:
    """End the exchanges and return the rows of all halves together."""
    for exchange in exchanges:
        exchange.end()
    return parts[0].view_as(parts[0]) if len(parts) == 1 else torch.cat(parts, dim=1)


class _DivideGradient(torch.autograd.Function):
    """Divides gradients: an expert's gradient is summed over the losses of E ranks, where their mean is wanted."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, by: int) -> Tensor:
        ctx.by = by
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] / ctx.by, None
