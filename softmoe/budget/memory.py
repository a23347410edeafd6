"""Estimate the bytes of training before anything runs.

Weights, gradients and optimizer state are exact. Activations are the tensors that autograd keeps for the backward pass,
by formula, in eager PyTorch on a CPU with its fused attention (that of softmoe.accelerate keeps a little less). Not
counted: short-lived temporaries, the allocator's waste, and the copies that compiled or distributed programs make.
Letters: see parts.py; B images.
"""

from collections.abc import Collection
from dataclasses import dataclass

from softmoe.budget.count import cost
from softmoe.budget.parts import LEARNED, SPARSE, checked, mlp_widths, parts, patches, routed, token_widths
from softmoe.models import ViTConfig

OPTIMIZER_STATES = {"adamw": 2, "adam": 2, "muon": 2, "sgd": 1, "none": 0}
"""Numbers kept per parameter; of the matrices that Muon itself updates one less. SGD is with momentum."""
ROUTING_BYTES = 4  # routers compute in float32 whatever the model runs in
INDEX_BYTES = 8
MAX_IN_FLIGHT = 2  # gradients of one shape at work at the same time, as softmoe/accelerate/buffers.py has it
WAITING = 64 << 20  # bytes of small gradients that updates in the backward pass let wait for each other


@dataclass(frozen=True)
class Memory:
    """The bytes that one training step needs."""

    weights: int
    gradients: int
    optimizer_state: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer_state + self.activations


def memory(
    config: ViTConfig,
    batch_size: int,
    *,
    optimizer: str = "adamw",
    weight_bytes: int = 4,
    activation_bytes: int = 4,
    state_bytes: int | None = None,
    in_backward: bool = False,
    recomputed: Collection[int] = (),
) -> Memory:
    """Estimate the bytes to train a model on batches of `batch_size` images.

    4 bytes are float32, 2 are float16 or bfloat16. 4-byte weights with 2-byte activations is autocast, which also
    keeps a 2-byte copy of the weights. `state_bytes` is of one number of the optimizer's state (None: as the weights).
    `recomputed` numbers the blocks whose inside is computed again in the backward pass (gradient checkpointing).
    With updates `in_backward` the gradients are those of the largest parameter, and few smaller ones; of two such
    parameters with a small state, whose updates run beside the pass.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if optimizer not in OPTIMIZER_STATES:
        raise ValueError(f"unknown optimizer {optimizer!r}, expected one of: {', '.join(OPTIMIZER_STATES)}")
    params = cost(checked(config)).params
    activations = activation_memory(config, batch_size, activation_bytes, recomputed)
    if activation_bytes < weight_bytes:
        activations += params * activation_bytes
    weights = params * weight_bytes
    state_bytes = weight_bytes if state_bytes is None else state_bytes
    at_once = (1 if state_bytes == weight_bytes else MAX_IN_FLIGHT) * largest_parameter(config) * weight_bytes + WAITING
    gradients = min(weights, at_once) if in_backward else weights
    numbers = OPTIMIZER_STATES[optimizer] * params - (block_matrices(config) if optimizer == "muon" else 0)
    return Memory(weights, gradients, numbers * state_bytes, activations)


def block_matrices(config: ViTConfig) -> int:
    """Count the weights in the matrices of attention, MLPs and experts, biases left out."""
    c, moe = config, routed(config)
    experts = 0 if moe is None else moe.layers * moe.experts * moe.hidden
    return 2 * c.width * (c.depth * 2 * c.width + sum(mlp_widths(c)) + experts)


def largest_parameter(config: ViTConfig) -> int:
    """Count the numbers in the largest parameter: the stacked matrices of all experts, if there are any."""
    c, moe = config, routed(config)
    matrices = [3 * c.width**2, c.width * c.mlp_dim, 3 * c.width * c.patch_size**2, c.width * (c.num_classes or 0)]
    if moe is not None and moe.layers:
        matrices.append(moe.experts * c.width * moe.hidden)
    return max(matrices)


def activation_memory(config: ViTConfig, batch_size: int, item: int, recomputed: Collection[int] = ()) -> int:
    """Return the most bytes that are kept from the forward pass for the backward pass; `item` is the size of a number.

    Of a recomputed block its input is kept. When its inside is computed again, what is above it is gone.
    """
    kept = highest = 0
    for index, (tokens, inside) in enumerate(block_bytes(config, batch_size, item)):
        again = index in recomputed
        kept += batch_size * tokens * config.width * item if again else inside
        highest = max(highest, kept + inside * again)
    return highest + outside_bytes(config, batch_size, item)


def block_bytes(config: ViTConfig, batch_size: int, item: int) -> list[tuple[int, int]]:
    """Return for each block the tokens of an image that enter it, and the bytes that it keeps for the backward pass."""
    c, blocks, widths = config, [], mlp_widths(config)
    for index, tokens in enumerate(c.tokens_by_block[:-1]):
        kept = attention_bytes(c, batch_size, tokens, item)
        if index in c.moe_blocks:
            kept += moe_bytes(c, batch_size, item, on_slots=c.last_map is not None and index > c.last_map)
        if widths[index]:
            kept += mlp_bytes(c, widths[index], batch_size * tokens, item)
        if c.merge and c.merge[0] == index:
            kept += merger_bytes(c, batch_size, item)
        blocks.append((tokens, kept))
    return blocks


def blocks_to_recompute(config: ViTConfig, batch_size: int, item: int, limit: float) -> tuple[int, ...]:
    """Choose the blocks to compute twice so that activations take at most `limit` bytes, for as little work as can be.

    First come blocks of the kind that frees most bytes for a multiply-accumulate; of a kind the lowest first, whose
    insides come when those above are gone. ValueError if all blocks are not enough.
    """
    freed = [
        inside - batch_size * tokens * config.width * item for tokens, inside in block_bytes(config, batch_size, item)
    ]
    work = block_work(config)
    order = sorted(range(config.depth), key=lambda index: (-freed[index] / work[index], index))
    kept = [activation_memory(config, batch_size, item, order[:count]) for count in range(config.depth + 1)]
    enough = next((count for count, size in enumerate(kept) if size <= limit), None)
    if enough is None:
        raise ValueError(
            f"activations of {batch_size} images take {min(kept) / 1e9:.3g} GB even if every block is computed twice, "
            f"more than the {limit / 1e9:.3g} GB of activation_gb: raise accumulate, or lower data.batch_size"
        )
    chosen = order[:enough]
    for index in sorted(chosen, key=lambda index: -work[index]):  # the last may have made an earlier one needless
        rest = [other for other in chosen if other != index]
        if activation_memory(config, batch_size, item, rest) <= limit:
            chosen = rest
    return tuple(sorted(chosen))


def block_work(config: ViTConfig) -> list[float]:
    """Return each block's part of the multiply-accumulates of an image, in proportion to its tokens."""
    part, entering, widths = parts(config), config.tokens_by_block[:-1], mlp_widths(config)
    routed_work = (part["routing"].macs + part["experts"].macs) / max(1, len(config.moe_blocks))
    return [
        part["attention"].macs * tokens / sum(entering)
        + part["mlp"].macs * tokens * widths[index] / max(1, token_widths(config))
        + (routed_work if index in config.moe_blocks else 0)
        for index, tokens in enumerate(entering)
    ]


def outside_bytes(config: ViTConfig, batch_size: int, item: int) -> int:
    """Return the bytes of what stands outside the blocks: pixels, the last norm, pooling and head."""
    c, T = config, batch_size * config.tokens_by_block[-1]
    height, width = c.image_shape
    kept = batch_size * 3 * height * width + T * (c.width + 2)
    kept += batch_size * c.tokens * c.width if c.dropout else 0
    if c.pool == "attention":  # its input, keys and values, and the normalized keys
        kept += T * c.width * (4 if c.qk_norm else 3) + batch_size * (7 * c.width + 2 * c.mlp_dim)
    kept += sum(2 * batch_size * c.tokens_by_block[block + 1] for block in c.head_blocks)  # the norms' statistics
    return (kept + batch_size * (c.head_width + (c.representation_size or 0) + (c.num_classes or 0))) * item


def attention_bytes(config: ViTConfig, batch_size: int, tokens: int, item: int) -> int:
    """Return the bytes of an attention: its residual inputs and norms; queries, keys, values; the fused result."""
    D, A, T = config.width, config.heads, batch_size * tokens
    rows = 11 if config.attention_dropout else 10 if config.qk_norm else 8
    kept = T * (rows * D + (5 if config.qk_norm else 1) * A + 4)
    if config.attention_dropout:  # not fused: the weights before and after dropout, and its mask
        kept += 3 * A * T * tokens
    if config.dropout:
        kept += T * D
    return kept * item


def mlp_bytes(config: ViTConfig, hidden: int, T: int, item: int) -> int:
    """Return the bytes of a dense MLP: before and after the GELU; with dropout its two masks."""
    masks = hidden + config.width if config.dropout else 0
    return T * (2 * hidden + masks) * item


def merger_bytes(config: ViTConfig, batch_size: int, item: int) -> int:
    """Return the bytes of a merger: its input, the normalized tokens, the weights, and the statistics of the norm."""
    assert config.merge is not None
    return batch_size * patches(config) * (2 * config.width + config.merge[1] + 2) * item


def moe_bytes(config: ViTConfig, batch_size: int, item: int, on_slots: bool = False) -> int:
    """Return the bytes of an MoE layer: routing weights or indices, the experts' rows in and out, and their insides."""
    moe, M, D = routed(config), config.tokens, config.width
    assert moe is not None
    H = moe.hidden
    assert config.moe is not None
    T, N = batch_size * M, moe.experts
    if moe.router in SPARSE:
        groups = -(-T // (vars(config.moe.router)["group_size"] or M))
        R = N * moe.capacity * groups
        routing = T * N * (2 * ROUTING_BYTES + INDEX_BYTES) + R * (ROUTING_BYTES + INDEX_BYTES)
        rows = 3 * R * D
    else:
        R = round(batch_size * moe.rows)
        routing = R * (ROUTING_BYTES + INDEX_BYTES) if moe.router == "identity" else 2 * T * moe.slots * ROUTING_BYTES
        if moe.router != "identity" and item < ROUTING_BYTES:
            routing += 2 * T * moe.slots * item  # the weights once more, in the dtype of the tokens
        if moe.router in LEARNED:  # normalized tokens and slot parameters
            routing += (T + 2 * moe.slots) * D * ROUTING_BYTES
        rows = 2 * R * D
    if on_slots:  # what the experts get is a copy of the normalized slots, and nothing is routed
        routing, rows = 0, R * D
    dropout = config.dropout if config.moe.expert_dropout is None else config.moe.expert_dropout
    masks = R * (H + D) if dropout else 0
    return routing + (rows + 2 * R * H + masks) * item
