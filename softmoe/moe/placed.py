"""Soft MoE routing in which slots prefer a place in the image. This is ours, not the paper's: see docs/choices.md.

Letters: B images, M tokens, D width, N experts, P slots per expert.

The image is the unit square. Every slot also has a learned center and width there, and the squared distance from a
token to that center, over the squared width, is subtracted from the logit of Algorithm 1:

    logit(token, slot) = scale * cosine(token, slot vector) - |place of token - center of slot|^2 / width of slot^2

So a slot prefers the tokens near its center, but the content of a token can outweigh its place. Places are fractions
of the image, so the same slots work at any image size. The centers start on an even grid.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from softmoe.moe.routing import Router, routing_dtype
from softmoe.moe.soft import DenseRouting, SoftConfig, SoftRouter

Grid = tuple[int, int]


@dataclass(frozen=True)
class PlacedConfig(SoftConfig, name="placed"):
    place_init: float = 4.0
    """How much a slot's logit falls, at the start, from its center to the next one on the grid of centers."""

    def build(self, dim: int) -> Router:
        return PlacedRouter(dim, **vars(self))


class PlacedRouter(SoftRouter):
    """A Soft router whose slots prefer places. PlacedConfig describes the options.

    `grid` is (rows, columns): the last rows * columns tokens are the cells of an image, row by row. Tokens before them,
    such as a class token, have no place. Without a grid no token has one, and the router is the plain Soft router.
    """

    takes_grid = True

    def __init__(
        self,
        dim: int,
        num_experts: int,
        slots_per_expert: int = 1,
        *,
        normalize: bool = True,
        noise_std: float = 0.0,
        scale_init: float = 1.0,
        place_init: float = 4.0,
    ):
        super().__init__(
            dim, num_experts, slots_per_expert, normalize=normalize, noise_std=noise_std, scale_init=scale_init
        )
        self.place = Place(num_experts, slots_per_expert, place_init)

    def forward(self, x_BMD: Tensor, mask: Tensor | None = None, grid: Grid | None = None) -> DenseRouting:
        logits_BMNP = self.logits(x_BMD, mask)
        if grid is not None:
            logits_BMNP = logits_BMNP + self.place(grid, x_BMD.shape[1]).to(logits_BMNP.dtype)
        return self.routing(logits_BMNP, mask)


class Place(nn.Module):
    """Learns for each slot a center (row, column) and the logarithm of a width, as fractions of the image."""

    def __init__(self, num_experts: int, slots_per_expert: int, strength: float):
        super().__init__()
        if strength <= 0:
            raise ValueError(f"place_init must be above 0, got {strength}; the router soft has no place")
        self.strength = strength
        self.center = nn.Parameter(torch.empty(num_experts, slots_per_expert, 2))
        self.log_width = nn.Parameter(torch.empty(num_experts, slots_per_expert))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Put the centers on an even grid, and let the logit fall by `strength` within one of its rows."""
        N, P, _ = self.center.shape
        with torch.no_grad():
            self.center.copy_(torch.tensor(even_grid(N * P)).view(N, P, 2))
            self.log_width.fill_(-math.log(grid_rows(N * P) * math.sqrt(self.strength)))

    def forward(self, grid: Grid, tokens: int) -> Tensor:
        """Return the (M, N, P) numbers that are added to the logits of an image's tokens.

        A token without a place weighs in every slot as much as the placed ones do on average.
        """
        rows, columns = grid
        prefix = tokens - rows * columns
        if prefix < 0:
            raise ValueError(f"a grid of {rows} x {columns} has {rows * columns} cells, but there are {tokens} tokens")
        center_NP2, log_width_NP = (p.to(routing_dtype(p.dtype)) for p in (self.center, self.log_width))
        y, x = (
            (torch.arange(count, dtype=center_NP2.dtype, device=center_NP2.device) + 0.5) / count
            for count in (rows, columns)
        )
        place_M2 = torch.stack(torch.meshgrid(y, x, indexing="ij"), dim=-1).reshape(-1, 2)
        apart_MNP = (place_M2[:, None, None] - center_NP2).square().sum(-1)
        bias_MNP = -apart_MNP * torch.exp(-2 * log_width_NP)
        if not prefix:
            return bias_MNP
        mean_1NP = bias_MNP.logsumexp(0, keepdim=True) - math.log(rows * columns)
        return torch.cat([mean_1NP.expand(prefix, -1, -1), bias_MNP])


def grid_rows(count: int) -> int:
    return max(1, round(math.sqrt(count)))


def even_grid(count: int) -> list[tuple[float, float]]:
    """Return `count` points of the unit square in even rows, of which the first may have one more than the last."""
    rows = grid_rows(count)
    lengths = [count // rows + (row < count % rows) for row in range(rows)]
    return [((row + 0.5) / rows, (k + 0.5) / length) for row, length in enumerate(lengths) for k in range(length)]
