"""Auxiliary losses that balance Tokens Choice. Each returns one value per group; masked tokens do not count.

Letters: G groups, L tokens per group, N experts.
"""

import math

import torch
from torch import Tensor


def importance_loss(clean_GLN: Tensor, mask_GL: Tensor) -> Tensor:
    """Squared coefficient of variation of the summed (noise-free) gates per expert."""
    return squared_variation((clean_GLN * mask_GL.unsqueeze(-1)).sum(1))


def load_loss(
    clean_logits_GLN: Tensor, noisy_logits_GLN: Tensor, noise_scale: float, top_k: int, mask_GL: Tensor
) -> Tensor:
    """The same of the probability that an expert is among the K first if its noise were drawn again."""
    threshold_GL1 = noisy_logits_GLN.topk(top_k, dim=-1).values[..., -1:]
    distance_GLN = (threshold_GL1 - clean_logits_GLN) / noise_scale
    chosen_GLN = 0.5 * torch.erfc(distance_GLN / math.sqrt(2.0))
    return squared_variation(mean_over_tokens(chosen_GLN, mask_GL))


def gshard_loss(gates_GLN: Tensor, first_GL: Tensor, mask_GL: Tensor) -> Tensor:
    """N * sum over experts of mean gate times share of first choices; 1 when balanced. Gradient by the gates only."""
    N = gates_GLN.shape[-1]
    first_GLN = torch.zeros_like(gates_GLN).scatter(-1, first_GL.unsqueeze(-1), 1.0)
    share_GN = mean_over_tokens(first_GLN, mask_GL)
    return N * (mean_over_tokens(gates_GLN, mask_GL) * share_GN).sum(-1)


def squared_variation(x_GN: Tensor) -> Tensor:
    """(standard deviation / mean)^2 over experts, population deviation; 0 for a group without real tokens."""
    mean_G1 = x_GN.mean(-1, keepdim=True)
    safe_G1 = torch.where(mean_G1 > 0, mean_G1, 1.0)
    return ((x_GN - mean_G1) / safe_G1).square().mean(-1)


def mean_over_tokens(x_GLN: Tensor, mask_GL: Tensor) -> Tensor:
    count_G1 = mask_GL.sum(1, keepdim=True).clamp(min=1)
    return (x_GLN * mask_GL.unsqueeze(-1)).sum(1) / count_G1
