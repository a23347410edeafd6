"""First weights, with the fans said outright: stacked and packed tensors would give the wrong ones.

On the meta device there is nothing to fill, and torch would spend seconds on finding out how: all return at once.
"""

import math

from torch import Tensor, nn


def lecun_normal_(weight: Tensor, fan_in: int) -> None:
    """Normal of variance 1/fan_in, cut at two standard deviations (0.8796 is the deviation left after the cut)."""
    std = math.sqrt(1.0 / fan_in) / 0.87962566103423978
    if not weight.is_meta:
        nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def xavier_uniform_(weight: Tensor, fan_in: int, fan_out: int) -> None:
    bound = math.sqrt(6.0 / (fan_in + fan_out))
    if not weight.is_meta:
        nn.init.uniform_(weight, -bound, bound)


def normal_(weight: Tensor, std: float) -> None:
    if not weight.is_meta:
        nn.init.normal_(weight, std=std)
