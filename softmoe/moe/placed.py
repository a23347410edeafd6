"""Soft MoE routing in which slots prefer a place in the image. This is ours, not the paper's: see docs/choices.md.

Letters: B images, M tokens, D width, N experts, P slots per expert.

The image is the unit square. Every slot also has a learned center and width there, and the squared distance from a
token to that center, over the squared width, is subtracted from the logit of Algorithm 1:

    logit(token, slot) = scale * cosine(token, slot vector) - |place of token - center of slot|^2 / width of slot^2

So a slot prefers the tokens near its center, but the content of a token can outweigh its place. Places are fractions
of the image, so the same slots work at any image size. The centers start on an even grid.

With `combine_place=False` that is the logit of dispatch alone, and combine has the cosine without the distance: a place
says which tokens a slot takes, and only content says which tokens get its output.

With `frame`, places are measured from what the image shows, so that a slot prefers the same part of an object wherever
the object is and whatever its size:

    weights  = softmax over tokens of SHARPNESS * (normalize(token) @ direction)     direction is learned, from 0 on
    middle   = weighted mean of the places of the tokens
    spread   = weighted mean of |place - middle|^2, as a share of that of the whole image
    size     = sqrt((spread + LEAST_SPREAD) / (1 + LEAST_SPREAD))
    place in the frame = 1/2 + (place - middle) / size

A direction of 0 weighs all tokens alike: the frame starts as the image itself. Its size is never below a fifth.
"""

import math

import torch
from torch import Tensor, nn

from softmoe.moe.routing import no_autocast, routing_dtype
from softmoe.moe.soft import EPS, DenseRouting, SoftRouter, l2_normalize, softmax_over_tokens

Grid = tuple[int, int]
SHARPNESS = 4.0  # lets the direction of a frame learn at the rate of the slot vectors
LEAST_SPREAD = 0.05  # one token alone has no spread, and would be a frame of size zero


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
        frame: bool = False,
        combine_place: bool = True,
    ):
        super().__init__(
            dim, num_experts, slots_per_expert, normalize=normalize, noise_std=noise_std, scale_init=scale_init
        )
        self.place = Place(num_experts, slots_per_expert, place_init)
        self.frame = Frame(dim) if frame else None
        self.combine_place = combine_place

    def forward(self, x_BMD: Tensor, mask: Tensor | None = None, grid: Grid | None = None) -> DenseRouting:
        content_BMNP = self.logits(x_BMD, mask)
        placed_BMNP = content_BMNP if grid is None else self.with_places(content_BMNP, x_BMD, mask, grid)
        return self.routing(placed_BMNP, placed_BMNP if self.combine_place else content_BMNP, mask)

    def with_places(self, logits_BMNP: Tensor, x_BMD: Tensor, mask: Tensor | None, grid: Grid) -> Tensor:
        """Return the logits less the squared distances of tokens from the centers of slots, in widths of the slots."""
        place_M2, prefix = grid_places(grid, x_BMD)
        if self.frame is None:
            bias_BMNP = self.place(place_M2, prefix)
        else:
            real_BM = None if mask is None else mask[:, prefix:]
            bias_BMNP = self.place(self.frame(place_M2, x_BMD[:, prefix:], real_BM), prefix)
        return logits_BMNP + bias_BMNP.to(logits_BMNP.dtype)


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

    def forward(self, place_M2: Tensor, prefix: int) -> Tensor:
        """Return the (M, N, P) numbers that are added to the logits of an image's tokens.

        The places (cells, 2), with the images in front if each has its own, are those of the last tokens. Each of the
        `prefix` tokens before them has none and weighs in every slot as much as the placed ones do on average.
        """
        center_NP2, log_width_NP = (p.to(routing_dtype(p.dtype)) for p in (self.center, self.log_width))
        bias_MNP = -slot_distances(place_M2.to(center_NP2.dtype), center_NP2, log_width_NP)
        if not prefix:
            return bias_MNP
        mean_1NP = bias_MNP.logsumexp(-3, keepdim=True) - math.log(place_M2.shape[-2])
        return torch.cat([mean_1NP.expand(*mean_1NP.shape[:-3], prefix, -1, -1), bias_MNP], dim=-3)


class Frame(nn.Module):
    """Finds the frame of each image, and the places of its tokens in it: (cells, 2) -> (B, cells, 2)."""

    def __init__(self, dim: int):
        super().__init__()
        self.direction = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.direction)

    def forward(self, place_M2: Tensor, x_BMD: Tensor, mask: Tensor | None) -> Tensor:
        return places_in_frame(place_M2, x_BMD, self.direction, mask)


def places_in_frame(place_M2: Tensor, x_BMD: Tensor, direction_D: Tensor, mask: Tensor | None) -> Tensor:
    """Return the places (B, cells, 2) of tokens in the frame of each image, from those in the image itself."""
    with no_autocast(x_BMD):
        tokens_BMD = l2_normalize(x_BMD.to(routing_dtype(x_BMD.dtype)), dim=-1)
        logits_BM = SHARPNESS * (tokens_BMD @ direction_D.to(tokens_BMD.dtype))
        weights_BM = softmax_over_tokens(logits_BM[:, :, None, None], mask).flatten(1)
        place_M2 = place_M2.to(weights_BM.dtype)
        middle_B12 = (weights_BM @ place_M2).unsqueeze(1)
        apart_BM = (place_M2 - middle_B12).square().sum(-1)
        whole = (place_M2 - 0.5).square().sum(-1).mean().clamp(min=EPS)  # one cell alone has no spread
        spread_B = (weights_BM * apart_BM).sum(1) / whole
        squared_size_B = (spread_B + LEAST_SPREAD) / (1 + LEAST_SPREAD)
        return 0.5 + (place_M2 - middle_B12) * squared_size_B.rsqrt()[:, None, None]


def slot_distances(place_M2: Tensor, center_NP2: Tensor, log_width_NP: Tensor) -> Tensor:
    """Return the squared distances (M, N, P) from places to the centers of slots, in squared widths of the slots."""
    return (place_M2[..., None, None, :] - center_NP2).square().sum(-1) * torch.exp(-2 * log_width_NP)


def grid_places(grid: Grid, x_BMD: Tensor) -> tuple[Tensor, int]:
    """Return the places (rows * columns, 2) of the cells of a grid, and the number of tokens before them."""
    rows, columns = grid
    prefix = x_BMD.shape[1] - rows * columns
    if prefix < 0:
        raise ValueError(
            f"a grid of {rows} x {columns} has {rows * columns} cells, but there are {x_BMD.shape[1]} tokens"
        )
    dtype = routing_dtype(x_BMD.dtype)
    y, x = ((torch.arange(count, dtype=dtype, device=x_BMD.device) + 0.5) / count for count in (rows, columns))
    return torch.stack(torch.meshgrid(y, x, indexing="ij"), dim=-1).reshape(-1, 2), prefix


def grid_rows(count: int) -> int:
    return max(1, round(math.sqrt(count)))


def even_grid(count: int) -> list[tuple[float, float]]:
    """Return `count` points of the unit square in even rows, of which the first may have one more than the last."""
    rows = grid_rows(count)
    lengths = [count // rows + (row < count % rows) for row in range(rows)]
    return [((row + 0.5) / rows, (k + 0.5) / length) for row, length in enumerate(lengths) for k in range(length)]
