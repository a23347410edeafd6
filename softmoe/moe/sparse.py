"""The sparse routers: Tokens Choice (each token picks experts) and Experts Choice (each expert picks tokens).

Letters: B images, M tokens, D width, N experts, K choices per token, G groups, L tokens per group, C slots per
expert and group (the capacity); T = B*M tokens in all, S = G*C rows per expert.

Tokens are routed in groups: one image by default, or `group_size` consecutive tokens, which may span images. The last
group is padded with masked tokens if it is not full. Rows are moved by index (see SparseRouting): no tensor of size
L x N x C is ever made. The losses that balance Tokens Choice have one value per group and ignore masked tokens.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from softmoe.moe.experts import lecun_normal_
from softmoe.moe.routing import (
    Router,
    SparseRouting,
    at_least_one,
    check_tokens,
    no_autocast,
    not_negative,
    routing_dtype,
)


@dataclass(frozen=True)
class Gates:
    """The gates that both sparse routers start from. Without noise the noisy logits are the plain ones."""

    logits_GLN: Tensor
    noisy_GLN: Tensor
    gates_GLN: Tensor
    mask_GL: Tensor
    noise_scale: float


class SparseRouter(Router):
    """The base of both sparse routers: gate logits, noise, groups and capacity."""

    def __init__(
        self,
        dim: int,
        num_experts: int,
        capacity_factor: float = 1.0,
        group_size: int | None = None,
        noise_std: float = 1.0,
        *,
        capacity: int | None = None,
        capacity_rounding: str = "round",
        capacity_multiple_of: int = 1,
    ):
        super().__init__(dim, num_experts)
        if capacity_factor <= 0:
            raise ValueError(f"capacity_factor must be above 0, got {capacity_factor}")
        if capacity_rounding not in ("round", "ceil"):
            raise ValueError(f"capacity_rounding must be 'round' or 'ceil', got {capacity_rounding!r}")
        self.capacity_factor = capacity_factor
        self.fixed_capacity = None if capacity is None else at_least_one("capacity", capacity)
        self.capacity_rounding = capacity_rounding
        self.capacity_multiple_of = at_least_one("capacity_multiple_of", capacity_multiple_of)
        self.group_size = None if group_size is None else at_least_one("group_size", group_size)
        self.noise_std = not_negative("noise_std", noise_std)
        self.weight = nn.Parameter(torch.empty(dim, num_experts))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        lecun_normal_(self.weight, fan_in=self.dim)

    def capacity(self, group_size: int, choices: int = 1) -> int:
        """Return the slots per expert and group: L * K * factor / N, half to even, at least 1 (as in the paper)."""
        if self.fixed_capacity is not None:
            return self.fixed_capacity
        exact = group_size * choices * self.capacity_factor / self.num_experts
        whole = max(1, round(exact) if self.capacity_rounding == "round" else math.ceil(exact))
        multiple = self.capacity_multiple_of
        return -(-whole // multiple) * multiple

    def compute_gates(self, x_BMD: Tensor, mask: Tensor | None) -> Gates:
        check_tokens(x_BMD, mask, self.dim)
        B, M, _ = x_BMD.shape
        dtype = routing_dtype(x_BMD.dtype)
        with no_autocast(x_BMD):
            logits_TN = x_BMD.flatten(0, 1).to(dtype) @ self.weight.to(dtype)
        noise_scale = self.noise_std / self.num_experts if self.training else 0.0
        noisy_TN = logits_TN + noise_scale * torch.randn_like(logits_TN) if noise_scale else logits_TN
        mask_T = logits_TN.new_ones(B * M, dtype=torch.bool) if mask is None else mask.flatten()
        size = self.group_size or M
        logits_GLN, noisy_GLN = into_groups(logits_TN, size), into_groups(noisy_TN, size)
        gates_GLN = noisy_GLN.softmax(-1)
        return Gates(logits_GLN, noisy_GLN, gates_GLN, into_groups(mask_T, size), noise_scale)

    def extra_repr(self) -> str:
        capacity = (
            f"capacity={self.fixed_capacity}" if self.fixed_capacity else f"capacity_factor={self.capacity_factor}"
        )
        return f"{self.dim}, num_experts={self.num_experts}, {capacity}, group_size={self.group_size}"


class TokensChoiceRouter(SparseRouter):
    """The router in which each token picks the K experts of its largest gates, as long as they have room.

    The first choices of all tokens are served before all second choices, and among equal choices tokens in their order,
    or with batch priority those with the largest gate first. A choice of an expert that is full is lost. An expert's
    output is weighted by the raw gate, not normalized over the chosen ones. TokensChoiceConfig describes the options.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int = 1,
        capacity_factor: float = 1.0,
        batch_priority: bool = True,
        group_size: int | None = None,
        noise_std: float = 1.0,
        importance_weight: float = 0.005,
        load_weight: float = 0.005,
        gshard_weight: float = 0.0,
        *,
        capacity: int | None = None,
        capacity_rounding: str = "round",
        capacity_multiple_of: int = 1,
    ):
        super().__init__(
            dim,
            num_experts,
            capacity_factor,
            group_size,
            noise_std,
            capacity=capacity,
            capacity_rounding=capacity_rounding,
            capacity_multiple_of=capacity_multiple_of,
        )
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k must be between 1 and the {num_experts} experts, got {top_k}")
        self.top_k = top_k
        self.batch_priority = batch_priority
        self.importance_weight = importance_weight
        self.load_weight = load_weight
        self.gshard_weight = gshard_weight

    def forward(self, x_BMD: Tensor, mask: Tensor | None = None) -> SparseRouting:
        g = self.compute_gates(x_BMD, mask)
        G, L, N = g.gates_GLN.shape
        T = x_BMD.shape[0] * x_BMD.shape[1]
        capacity = self.capacity(L, self.top_k)
        gate_GLK, expert_GLK = top_k_first(g.gates_GLN, self.top_k)
        priority_GL = gate_GLK[..., 0].detach() if self.batch_priority else None
        position_GLK = buffer_positions(expert_GLK, priority_GL, g.mask_GL)
        kept_GLK = (position_GLK < capacity) & g.mask_GL.unsqueeze(-1)

        group_G11 = torch.arange(G, device=x_BMD.device).view(G, 1, 1)
        slot_GLK = (expert_GLK * G + group_G11) * capacity + position_GLK
        slot_GLK = torch.where(kept_GLK, slot_GLK, N * G * capacity)  # one more slot takes the dropped choices
        token_GLK = torch.arange(G * L, device=x_BMD.device).view(G, L, 1).expand_as(slot_GLK)
        token_R = token_GLK.new_full((N * G * capacity + 1,), T)
        token_R = token_R.scatter(0, slot_GLK.flatten(), token_GLK.flatten())[:-1]
        gate_R = gate_GLK.new_zeros(N * G * capacity + 1)
        gate_R = gate_R.scatter(0, slot_GLK.flatten(), gate_GLK.flatten())[:-1]
        shape = (N, G * capacity)
        return SparseRouting(
            token_R.view(shape),
            gate_R.view(shape),
            g.mask_GL.flatten()[:T],
            (x_BMD.shape[0], x_BMD.shape[1]),
            self.balance_loss(g, expert_GLK[..., 0]),
        )

    def balance_loss(self, g: Gates, first_GL: Tensor) -> Tensor:
        """Return the weighted sum of the balance losses, averaged over groups. The load is defined only with noise."""
        total_G = g.gates_GLN.new_zeros(g.gates_GLN.shape[0])
        if self.importance_weight:
            clean_GLN = g.logits_GLN.softmax(-1) if g.noise_scale else g.gates_GLN
            total_G = total_G + self.importance_weight * importance_loss(clean_GLN, g.mask_GL)
        if self.load_weight and g.noise_scale:
            load_G = load_loss(g.logits_GLN, g.noisy_GLN, g.noise_scale, self.top_k, g.mask_GL)
            total_G = total_G + self.load_weight * load_G
        if self.gshard_weight:
            total_G = total_G + self.gshard_weight * gshard_loss(g.gates_GLN, first_GL, g.mask_GL)
        return total_G.sum() / max(1, total_G.shape[0])  # an empty batch has no group


class ExpertsChoiceRouter(SparseRouter):
    """The router in which each expert picks the C tokens of a group with the largest gates; of equal ones the first.

    The softmax is over experts, per token. Any number of experts, or none, may pick a token.
    """

    def forward(self, x_BMD: Tensor, mask: Tensor | None = None) -> SparseRouting:
        g = self.compute_gates(x_BMD, mask)
        G, L, N = g.gates_GLN.shape
        T = x_BMD.shape[0] * x_BMD.shape[1]
        capacity = self.capacity(L)
        if capacity > L:
            raise ValueError(
                f"each expert would take {capacity} tokens of a group of {L}: lower the capacity, or group more tokens"
            )
        gates_NGL = g.gates_GLN.masked_fill(~g.mask_GL.unsqueeze(-1), 0.0).permute(2, 0, 1).contiguous()
        ranked_NGL = gates_NGL.masked_fill(~g.mask_GL, -1.0)  # masked tokens come last
        token_NGC = ranked_NGL.detach().sort(dim=-1, descending=True, stable=True).indices[..., :capacity]
        gate_NGC = gates_NGL.gather(-1, token_NGC)
        real_NGC = g.mask_GL.expand(N, G, L).gather(-1, token_NGC)
        group_G1 = torch.arange(G, device=x_BMD.device).view(G, 1)
        token_NGC = torch.where(real_NGC, token_NGC + L * group_G1, T)
        return SparseRouting(
            token_NGC.flatten(1), gate_NGC.flatten(1), g.mask_GL.flatten()[:T], (x_BMD.shape[0], x_BMD.shape[1])
        )


def into_groups(rows: Tensor, size: int) -> Tensor:
    """Split rows into groups, (T, ...) -> (G, size, ...), the last one padded with zeros (False for a mask)."""
    short = -rows.shape[0] % size
    if short:
        rows = torch.cat([rows, rows.new_zeros(short, *rows.shape[1:])])
    return rows.unflatten(0, (-1, size))


def top_k_first(gates_GLN: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the K largest gates and their experts, of equal gates the lower expert first (topk promises no order)."""
    rest_GLN = gates_GLN.detach()
    experts = []
    for _ in range(k):
        experts.append(rest_GLN.max(-1, keepdim=True).indices)
        rest_GLN = rest_GLN.scatter(-1, experts[-1], -1.0)
    expert_GLK = torch.cat(experts, -1)
    return gates_GLN.gather(-1, expert_GLK), expert_GLK


def buffer_positions(expert_GLK: Tensor, priority_GL: Tensor | None, mask_GL: Tensor) -> Tensor:
    """Return the place of each choice in its expert's buffer: how many choices of the same expert come before it.

    All first choices come before all second ones; among them larger priorities, and of equal or no priority earlier
    tokens. Masked tokens take no place.
    """
    G, L, K = expert_GLK.shape
    nobody = torch.iinfo(expert_GLK.dtype).max  # the expert of masked tokens
    expert_GKL = expert_GLK.masked_fill(~mask_GL.unsqueeze(-1), nobody).transpose(1, 2)
    token_GL = torch.arange(L, device=expert_GLK.device).expand(G, L)
    if priority_GL is not None:
        token_GL = priority_GL.sort(dim=1, descending=True, stable=True).indices
    token_GKL = token_GL.unsqueeze(1).expand(G, K, L)
    queue_GQ = expert_GKL.gather(2, token_GKL).flatten(1)  # the chosen experts, in the order they are served
    sorted_GQ, order_GQ = queue_GQ.sort(dim=1, stable=True)
    first_GQ = torch.searchsorted(sorted_GQ, sorted_GQ)  # where the choices of the same expert begin
    rank_GQ = torch.arange(L * K, device=expert_GLK.device) - first_GQ
    place_GKL = torch.empty_like(rank_GQ).scatter(1, order_GQ, rank_GQ).view(G, K, L)
    return torch.empty_like(place_GKL).scatter(2, token_GKL, place_GKL).transpose(1, 2)


def importance_loss(clean_GLN: Tensor, mask_GL: Tensor) -> Tensor:
    """Return the squared coefficient of variation, over experts, of the sum of the gates without noise."""
    return squared_variation((clean_GLN * mask_GL.unsqueeze(-1)).sum(1))


def load_loss(
    clean_logits_GLN: Tensor, noisy_logits_GLN: Tensor, noise_scale: float, top_k: int, mask_GL: Tensor
) -> Tensor:
    """Return the squared variation of the chance that an expert is among the K first if its noise is drawn again."""
    threshold_GL1 = noisy_logits_GLN.topk(top_k, dim=-1).values[..., -1:]
    distance_GLN = (threshold_GL1 - clean_logits_GLN) / noise_scale
    chosen_GLN = 0.5 * torch.erfc(distance_GLN / math.sqrt(2.0))
    return squared_variation(mean_over_tokens(chosen_GLN, mask_GL))


def gshard_loss(gates_GLN: Tensor, first_GL: Tensor, mask_GL: Tensor) -> Tensor:
    """Return N * sum over experts of mean gate times share of first choices: 1 if balanced.

    The gradient goes through the gates only.
    """
    N = gates_GLN.shape[-1]
    first_GLN = torch.zeros_like(gates_GLN).scatter(-1, first_GL.unsqueeze(-1), 1.0)
    share_GN = mean_over_tokens(first_GLN, mask_GL)
    return N * (mean_over_tokens(gates_GLN, mask_GL) * share_GN).sum(-1)


def squared_variation(x_GN: Tensor) -> Tensor:
    """Return (population standard deviation / mean)^2 over experts; 0 for a group without real tokens."""
    mean_G1 = x_GN.mean(-1, keepdim=True)
    safe_G1 = torch.where(mean_G1 > 0, mean_G1, 1.0)
    return ((x_GN - mean_G1) / safe_G1).square().mean(-1)


def mean_over_tokens(x_GLN: Tensor, mask_GL: Tensor) -> Tensor:
    count_G1 = mask_GL.sum(1, keepdim=True).clamp(min=1)
    return (x_GLN * mask_GL.unsqueeze(-1)).sum(1) / count_G1
