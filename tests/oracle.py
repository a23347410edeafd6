"""The layer from the paper's text, in plain loops and float64: slow, and easy to check by eye.

Nothing here is shared with softmoe. Letters: B images, M tokens, D width, N experts, P slots per expert, T = B*M.
A sparse assignment is a tuple (token, expert, place, gate): the flat index of the token, the expert that takes it,
its place in that expert's buffer of its group, and the weight of the result.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray
Assignment = tuple[int, int, int, float]
PAPER_PARAMS = {  # parameters at 224 pixels with the 29,593 classes of the paper
    "vit_s16": 33_059_737,
    "vit_b16": 108_555_673,
    "vit_l16": 333_635_481,
    "vit_h14": 668_675_993,
    "soft_s16_128e": 933_709_471,
    "soft_s14_256e": 1_841_402_527,
    "soft_b16_128e": 3_707_638_687,
    "soft_l16_128e": 13_127_249_829,
    "soft_h14_128e": 27_318_132_649,
    "soft_h14_256e": 54_177_406_889,
}


def softmax(values: Array) -> Array:
    """Over all entries of a vector."""
    powers = np.array([math.exp(value - max(values)) for value in values])
    return powers / sum(powers)


def gelu_tanh(x: float) -> float:
    return 0.5 * x * (1.0 + math.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


@dataclass
class ExpertWeights:
    """Stacked weights of N two-layer MLPs."""

    w1: Array
    b1: Array
    w2: Array
    b2: Array

    @classmethod
    def of(cls, module: Any) -> "ExpertWeights":
        """The weights of a module that has them under the same names."""
        return cls(*(getattr(module, name).detach().double().numpy() for name in ("w1", "b1", "w2", "b2")))

    def __call__(self, expert: int, row: Array) -> Array:
        hidden = row @ self.w1[expert] + self.b1[expert]
        return np.array([gelu_tanh(value) for value in hidden]) @ self.w2[expert].T + self.b2[expert]


# --- routers that mix: soft, uniform and the two halves ------------------------------------------------------


def unit(vector: Array) -> Array:
    return vector / math.sqrt(sum(value * value for value in vector) + 1e-6)


def soft_logits(x: Array, phi: Array, scale: float | None) -> Array:
    """(B, M, D), (D, N, P) -> (B, M, N, P): scale times the cosine, or the plain product without a scale."""
    (B, M, _), (_, N, P) = x.shape, phi.shape
    logits = np.zeros((B, M, N, P))
    for b, m, n, p in np.ndindex(B, M, N, P):
        token, slot = x[b, m], phi[:, n, p]
        logits[b, m, n, p] = token @ slot if scale is None else scale * (unit(token) @ unit(slot))
    return logits


def grid_places(rows: int, columns: int) -> Array:
    """The middle of each cell of the unit square, row by row: (cells, 2)."""
    return np.array([((r + 0.5) / rows, (c + 0.5) / columns) for r, c in np.ndindex(rows, columns)])


def frame_places(x: Array, direction: Array, rows: int, columns: int, mask: Array | None = None) -> Array:
    """(B, cells, D) -> (B, cells, 2): places seen from the middle of the tokens that the direction singles out, in
    units of how far these are spread, of which the whole image has 1."""
    places, seen = grid_places(rows, columns), np.zeros((len(x), rows * columns, 2))
    for image, tokens in enumerate(x):
        real = [m for m in range(len(tokens)) if mask is None or mask[image, m]]
        weights = np.zeros(len(tokens))
        if real:
            weights[real] = softmax(np.array([4.0 * (unit(tokens[m]) @ direction) for m in real]))
        middle = sum(w * place for w, place in zip(weights, places, strict=True))
        spread = sum(w * np.sum((place - middle) ** 2) for w, place in zip(weights, places, strict=True))
        whole = max(np.mean([np.sum((place - 0.5) ** 2) for place in places]), 1e-6)
        size = math.sqrt((spread / whole + 0.05) / 1.05)
        for m, place in enumerate(places):
            seen[image, m] = 0.5 + (place - middle) / size
    return seen


def place_bias(center: Array, width: Array, places: Array, prefix: int) -> Array:
    """(N, P, 2), (N, P), (cells, 2) -> (M, N, P): minus the squared distance in widths, cell by cell; first tokens
    without a place, which count as much as the cells do on average."""
    N, P = width.shape
    bias = np.zeros((prefix + len(places), N, P))
    for n, p in np.ndindex(N, P):
        for cell, place in enumerate(places):
            bias[prefix + cell, n, p] = -np.sum((place - center[n, p]) ** 2) / width[n, p] ** 2
        shares = [math.exp(value) for value in bias[prefix:, n, p]]
        bias[:prefix, n, p] = math.log(sum(shares) / len(shares))
    return bias


def dispatch_weights(logits: Array, mask: Array | None = None) -> Array:
    """Softmax over the real tokens, slot by slot."""
    B, M, N, P = logits.shape
    weights = np.zeros(logits.shape)
    for b, n, p in np.ndindex(B, N, P):
        real = [m for m in range(M) if mask is None or mask[b, m]]
        if real:
            weights[b, real, n, p] = softmax(logits[b, real, n, p])
    return weights


def combine_weights(logits: Array, mask: Array | None = None) -> Array:
    """Softmax over all slots of all experts, token by token."""
    B, M, N, P = logits.shape
    weights = np.zeros(logits.shape)
    for b, m in np.ndindex(B, M):
        if mask is None or mask[b, m]:
            weights[b, m] = softmax(logits[b, m].reshape(-1)).reshape(N, P)
    return weights


def dense_layer(x: Array, dispatch: Array, combine: Array, experts: Callable[[int, Array], Array]) -> Array:
    """Each slot a weighted sum of raw tokens; each output a weighted sum of slot results."""
    B, M, N, P = dispatch.shape
    y = np.zeros(x.shape)
    for b, n, p in np.ndindex(B, N, P):
        slot = sum(dispatch[b, m, n, p] * x[b, m] for m in range(M))
        result = experts(n, slot)
        for m in range(M):
            y[b, m] += combine[b, m, n, p] * result
    return y


# --- routers that choose: tokens choice, experts choice, identity --------------------------------------------


def merge(x: Array, queries: Array, prefix: int) -> Array:
    """PatchMerger of normalized tokens (B, M, D): each query's mean of them, by a softmax over the tokens."""
    merged = np.zeros((len(x), len(queries), x.shape[2]))
    for image, tokens in enumerate(x[:, prefix:]):
        for place, query in enumerate(queries):
            for weight, token in zip(softmax(np.array([token @ query for token in tokens])), tokens, strict=True):
                merged[image, place] += weight * token
    return merged


def token_groups(tokens: int, size: int) -> Iterator[list[int]]:
    """Consecutive tokens; the last group has what is left."""
    for start in range(0, tokens, size):
        yield list(range(start, min(start + size, tokens)))


def best(values: Array, count: int) -> list[int]:
    """Indices of the largest, decreasing, of equal ones the lower index first."""
    return sorted(range(len(values)), key=lambda index: (-values[index], index))[:count]


def tokens_choice(
    gates: Array, mask: Array, group_size: int, top_k: int, capacity: int, batch_priority: bool
) -> list[Assignment]:
    """(T, N) gates. All first choices before all second ones; while the expert of the choice has room."""
    kept = []
    for group in token_groups(len(gates), group_size):
        queue = [t for t in group if mask[t]]
        if batch_priority:
            queue = sorted(queue, key=lambda t: (-max(gates[t]), t))
        used = [0] * gates.shape[1]
        for k in range(top_k):
            for t in queue:
                expert = best(gates[t], top_k)[k]
                if used[expert] < capacity:
                    kept.append((t, expert, used[expert], gates[t, expert]))
                used[expert] += 1
    return kept


def experts_choice(gates: Array, mask: Array, group_size: int, capacity: int) -> list[Assignment]:
    """(T, N) gates. Each expert takes the tokens of each group that have its largest gates."""
    kept = []
    for group in token_groups(len(gates), group_size):
        real = [t for t in group if mask[t]]
        for expert in range(gates.shape[1]):
            for place, index in enumerate(best(gates[real, expert], capacity)):
                kept.append((real[index], expert, place, gates[real[index], expert]))
    return kept


def identity(images: int, tokens: int, experts: int, mask: Array) -> list[Assignment]:
    """Token i of each image goes whole to expert i mod N."""
    return [
        (b * tokens + m, m % experts, m // experts, 1.0) for b in range(images) for m in range(tokens) if mask[b, m]
    ]


def sparse_layer(x: Array, kept: list[Assignment], experts: Callable[[int, Array], Array]) -> Array:
    """Raw tokens through the experts that took them; results weighted by the raw gates; the rest stays zero."""
    rows = x.reshape(-1, x.shape[-1])
    y = np.zeros(rows.shape)
    for token, expert, _, gate in kept:
        y[token] += gate * experts(expert, rows[token])
    return y.reshape(x.shape)


# --- balancing losses, for one group of real tokens ----------------------------------------------------------


def squared_variation(values: Array) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values) / mean**2


def importance_loss(gates: Array) -> float:
    """Squared coefficient of variation over experts of the summed gates."""
    return squared_variation(gates.sum(0))


def load_loss(logits: Array, noisy: Array, noise_scale: float, top_k: int) -> float:
    """The same, of the mean chance to be among the K first if the noise of that one expert were drawn again."""
    tokens, experts = logits.shape
    chance = np.zeros(experts)
    for t in range(tokens):
        threshold = sorted(noisy[t], reverse=True)[top_k - 1]
        for n in range(experts):
            distance = (threshold - logits[t, n]) / noise_scale
            chance[n] += 1.0 - 0.5 * (1.0 + math.erf(distance / math.sqrt(2.0)))
    return squared_variation(chance / tokens)


def gshard_loss(gates: Array) -> float:
    """N times the sum over experts of mean gate times share of first choices."""
    tokens, experts = gates.shape
    first = [best(gates[t], 1)[0] for t in range(tokens)]
    return experts * sum(gates[:, n].mean() * first.count(n) / tokens for n in range(experts))
