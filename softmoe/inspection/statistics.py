"""Sum up what the paper looks at inside a model, batch by batch in bounded memory.

Letters: B images, M tokens, N experts, P slots per expert, S = N*P slots, R rows (slots or tokens of some images).

Every class here has `add`, to be called with one batch after the other, and `result`, plain numbers and short lists
for JSON and plots. Sums are float64 and counts whole numbers, so how the images are cut into batches does not matter.
Sorting is numpy's: on a CPU it is ten times as fast as torch's for rows this short. How alike the slots' parameters are
(the paper's Appendix J) needs no data.
"""

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from softmoe.inspection.streaming import BANDS, CurveBands, Histogram, chosen_ranks
from softmoe.moe import DenseRouting, NotCombined, Router, Routing, SoftRouter, SparseRouting

HEAVY, LIGHT = 2.0, 0.25  # summed dispatch weights of a token that the paper quotes shares for
LEVELS = (0.5, 0.8, 0.9, 0.95)  # shares of a slot's weight
CHUNK = 2**21  # weights sorted at a time: bounds the working memory whatever the batch
SLACK = 1e-6  # rounding of float32 weights: 18 of 36 equal tokens do reach one half
DUPLICATE = 0.99  # cosine from which two slots ask for the same tokens
BLOCK = 1024  # slots compared with all others at a time


class LayerStatistics(Protocol):
    def add(self, routing: Routing) -> None: ...

    def result(self) -> dict[str, Any]: ...


def layer_statistics(router: Router, routing: Routing) -> LayerStatistics:
    """Return the statistics that fit this kind of routing; its first routing tells the shapes."""
    if isinstance(routing, DenseRouting):
        _, M, N, P = routing.dispatch_weights.shape
        return DenseStatistics(M, N, P, combines=not isinstance(routing, NotCombined))
    if isinstance(routing, SparseRouting):
        return SparseStatistics(router.num_experts)
    raise ValueError(f"{type(router).__name__} returns a {type(routing).__name__}, which inspection does not know")


class DenseStatistics:
    """Statistics of the dispatch and combine weights of one layer, without padding (tokens that receive nothing)."""

    def __init__(self, tokens: int, experts: int, slots_per_expert: int, combines: bool = True):
        self.shape = (tokens, experts, slots_per_expert)
        self.combines = combines
        S = experts * slots_per_expert
        self.mass = TokenMass()
        self.importance = Importance(experts, slots_per_expert)
        self.width = SlotWidth(S, tokens)
        self.dispatch_curve, self.combine_curve = CurveBands(tokens), CurveBands(S)
        self.dispatch, self.combine = Sharpness(), Sharpness()
        self.slot_entropy_S = np.zeros(S)

    def add(self, routing: Routing) -> None:
        assert isinstance(routing, DenseRouting)
        dispatch_BMS = routing.dispatch_weights.detach().flatten(2).float().cpu().numpy()
        combine_BMS = routing.combine_weights.detach().flatten(2).float().cpu().numpy()
        if dispatch_BMS.shape[1] != self.shape[0]:
            raise ValueError(
                f"expected images of {self.shape[0]} tokens as in the first batch, got {dispatch_BMS.shape[1]}: "
                "inspect images of one size at a time"
            )
        real_BM = combine_BMS.sum(2) > 0
        self.mass.add(dispatch_BMS.sum(2, dtype=np.float64)[real_BM])
        self.importance.add(combine_BMS.sum((0, 1), dtype=np.float64), int(real_BM.sum()))
        some_B = real_BM.any(1)  # an image of padding alone fills no slot
        self._add_slots(np.ascontiguousarray(dispatch_BMS[some_B].transpose(0, 2, 1)))
        self._add_tokens(combine_BMS[real_BM])

    def _add_slots(self, weights_BSM: np.ndarray) -> None:
        B, S, M = weights_BSM.shape
        for images in chunks(B, S * M):
            weights_RM = weights_BSM[images].reshape(-1, M)
            sums_RM, largest_R = falling_sums(weights_RM)
            entropy_R = entropy(weights_RM)
            self.dispatch_curve.add(sums_RM)
            self.width.add(sums_RM.reshape(-1, S, M))
            self.dispatch.add(largest_R, entropy_R)
            self.slot_entropy_S += entropy_R.reshape(-1, S).sum(0)

    def _add_tokens(self, weights_TS: np.ndarray) -> None:
        for rows in chunks(*weights_TS.shape):
            sums_RS, largest_R = falling_sums(weights_TS[rows])
            self.combine_curve.add(sums_RS)
            self.combine.add(largest_R, entropy(weights_TS[rows]))

    def result(self) -> dict[str, Any]:
        M, N, P = self.shape
        return {
            "kind": "dense",
            "tokens": M,
            "experts": N,
            "slots_per_expert": P,
            "combines": self.combines,
            "token_mass": self.mass.result(),
            "importance": self.importance.result(),
            "tokens_per_slot": self.width.result(),
            "dispatch": self.dispatch.result(M),
            "combine": self.combine.result(N * P),
            "slot_entropy": (self.slot_entropy_S / max(self.width.images, 1)).tolist(),
            "dispatch_curve": curve(self.dispatch_curve),
            "combine_curve": curve(self.combine_curve),
        }


class SparseStatistics:
    """Counts assignments of one layer: who is dropped, how full the experts are, in how many experts a token is."""

    def __init__(self, experts: int):
        self.importance = Importance(experts, 1)
        self.load_N = np.zeros(experts, dtype=np.int64)
        self.places = self.tokens = self.dropped = 0
        self.copies = np.zeros(experts + 1, dtype=np.int64)
        self.tokens_per_image = 0

    def add(self, routing: Routing) -> None:
        assert isinstance(routing, SparseRouting)
        real_BM = routing.mask_T.view(routing.shape)
        self.tokens_per_image = routing.shape[1]
        self.load_N += routing.load.cpu().numpy()
        self.places += routing.token_of_slot_NS.numel()
        self.tokens += int(real_BM.sum())
        self.dropped += int(routing.dropped.sum())
        copies = routing.experts_per_token[real_BM].cpu().numpy()
        self.copies += np.bincount(copies, minlength=len(self.copies))
        self.importance.add(routing.gate_NS.detach().cpu().double().sum(1).numpy(), int(real_BM.sum()))

    def result(self) -> dict[str, Any]:
        used = int(np.flatnonzero(self.copies).max(initial=0))
        return {
            "kind": "sparse",
            "tokens": self.tokens_per_image,
            "experts": len(self.load_N),
            "slots_per_expert": 1,
            "dropped": self.dropped / max(self.tokens, 1),
            "filled": int(self.load_N.sum()) / max(self.places, 1),
            "load": (self.load_N / max(int(self.load_N.sum()), 1)).tolist(),
            "idle_experts": float((self.load_N == 0).mean()),
            "experts_per_token": (self.copies[: used + 1] / max(self.tokens, 1)).tolist(),
            "importance": self.importance.result(),
        }


class TokenMass:
    """The share that a token has in all slots together: the sum of its dispatch weights, S / M on average."""

    def __init__(self) -> None:
        self.histogram = Histogram(0.0, 8.0, 1024)
        self.heavy = self.light = 0
        self.sum = 0.0

    def add(self, mass: np.ndarray) -> None:
        self.histogram.add(mass)
        self.heavy += int((mass > HEAVY).sum())
        self.light += int((mass <= LIGHT).sum())
        self.sum += float(mass.sum())

    def result(self) -> dict[str, Any]:
        h = self.histogram
        total = max(h.total, 1)
        last = int(np.flatnonzero(h.counts).max(initial=0)) + 1
        return {
            "above_2": self.heavy / total,
            "up_to_0.25": self.light / total,
            "mean": self.sum / total,
            "smallest": h.smallest if h.total else 0.0,
            "largest": h.largest if h.total else 0.0,
            "bin_width": (h.high - h.low) / h.bins,
            "counts": h.counts[:last].tolist(),
        }


class Importance:
    """The share that each expert has in the outputs: the mean of its combine weights (or gates) over all tokens."""

    def __init__(self, experts: int, slots_per_expert: int):
        self.sum_S = np.zeros(experts * slots_per_expert)
        self.per_expert = (experts, slots_per_expert)
        self.tokens = 0

    def add(self, sum_S: np.ndarray, tokens: int) -> None:
        self.sum_S += sum_S
        self.tokens += tokens

    def result(self) -> dict[str, Any]:
        slots_S = self.sum_S / max(self.tokens, 1)
        experts_N = slots_S.reshape(self.per_expert).sum(1)
        least = experts_N.min()
        share_N = experts_N / max(experts_N.sum(), 1e-300)
        return {
            "experts": experts_N.tolist(),
            "slots": slots_S.tolist(),
            "max_over_min": float(experts_N.max() / least) if least > 0 else None,
            "effective_experts": float(np.exp(entropy(share_N[None])[0])),
        }


class SlotWidth:
    """The number of tokens that make 50, 80, 90 and 95 % of a slot's weight, and each slot's mean cumulative curve."""

    def __init__(self, slots: int, tokens: int):
        self.images = 0
        self.needed_LS = np.zeros((len(LEVELS), slots), dtype=np.int64)
        self.counts_LM = np.zeros((len(LEVELS), tokens + 1), dtype=np.int64)
        self.ranks = chosen_ranks(tokens)
        self.curve_SK = np.zeros((slots, len(self.ranks)))

    def add(self, sums_BSM: np.ndarray) -> None:
        self.images += len(sums_BSM)
        self.curve_SK += sums_BSM[:, :, self.ranks - 1].sum(0)
        for i, level in enumerate(LEVELS):
            needed_BS = (sums_BSM < level - SLACK).sum(2) + 1
            self.needed_LS[i] += needed_BS.sum(0)
            self.counts_LM[i] += np.bincount(needed_BS.ravel(), minlength=self.counts_LM.shape[1])

    def result(self) -> dict[str, Any]:
        """Return means over images for each slot, and exact quantiles over all slots of all images."""
        images = max(self.images, 1)
        levels = {
            str(level): {
                "mean": float(self.needed_LS[i].mean() / images),
                "slots": (self.needed_LS[i] / images).tolist(),
                "quantiles": {str(q): whole_quantile(self.counts_LM[i], q) for q in (0.05, 0.25, 0.5, 0.75, 0.95)},
            }
            for i, level in enumerate(LEVELS)
        }
        return {"levels": levels, "ranks": self.ranks.tolist(), "curves": (self.curve_SK / images).tolist()}


class Sharpness:
    """The distance of weights from uniform: mean largest weight, entropy, effective number of entries exp(entropy)."""

    def __init__(self) -> None:
        self.rows = 0
        self.largest = self.entropy = self.effective = 0.0

    def add(self, largest_R: np.ndarray, entropy_R: np.ndarray) -> None:
        self.rows += len(largest_R)
        self.largest += float(largest_R.sum(dtype=np.float64))
        self.entropy += float(entropy_R.sum(dtype=np.float64))
        self.effective += float(np.exp(entropy_R).sum(dtype=np.float64))

    def result(self, entries: int) -> dict[str, float]:
        rows = max(self.rows, 1)
        return {
            "mean_largest": self.largest / rows,
            "entropy": self.entropy / rows,
            "effective": self.effective / rows,
            "effective_share": self.effective / rows / entries,
        }


def falling_sums(weights_RM: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return cumulative sums of each row's weights in falling order, ending at 1; and each row's largest weight."""
    falling_RM = -np.sort(-weights_RM, axis=1)
    sums_RM = np.cumsum(falling_RM, axis=1, dtype=np.float64)
    return sums_RM / np.maximum(sums_RM[:, -1:], 1e-300), falling_RM[:, 0]


def entropy(weights_RM: np.ndarray) -> np.ndarray:
    """Return the entropy of each row (R,) in nats; weights of zero add nothing."""
    weights = weights_RM.astype(np.float64)
    return -(weights * np.log(np.maximum(weights, 1e-300))).sum(1)


def whole_quantile(counts: np.ndarray, q: float) -> int:
    """Return the smallest number below or at which a share q lies, from how often each whole number occurred."""
    below = np.cumsum(counts)
    return int(np.searchsorted(below, q * below[-1] - 1e-9))


def chunks(rows: int, columns: int) -> list[slice]:
    step = max(1, CHUNK // max(columns, 1))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def curve(bands: CurveBands) -> dict[str, Any]:
    found = bands.bands()
    return {
        "ranks": bands.ranks.tolist(),
        "mean": bands.mean.tolist(),
        "bands": {str(share): [edge.tolist() for edge in found[str(share)]] for share in BANDS},
    }


def slot_correlation(router: SoftRouter, first: int | None = None) -> Tensor:
    """Return the (S, S) inner products of normalized slot parameters, ordered by expert; of `first` slots if given."""
    phi_DS = router.phi.detach().flatten(1).cpu().double()[:, :first]  # mps has no float64
    unit_DS = torch.nn.functional.normalize(phi_DS, dim=0)
    return unit_DS.T @ unit_DS


@torch.no_grad()
def correlation_summary(router: Router) -> dict[str, Any] | None:
    """Return means of the inner products within and between experts, and the share of slots with a double elsewhere.

    Computed in blocks of rows, so thousands of slots need no matrix of all pairs. None for routers without slots.
    """
    if not isinstance(router, SoftRouter):
        return None
    N, P = router.num_experts, router.slots_per_expert
    S = N * P
    unit_DS = torch.nn.functional.normalize(router.phi.flatten(1).cpu().double(), dim=0)
    expert_S = torch.arange(S, device=unit_DS.device) // P
    own, other = -unit_DS.square().sum().item(), 0.0  # a slot with itself does not count
    doubles = 0
    largest = -1.0
    for start in range(0, S, BLOCK):
        rows = slice(start, min(start + BLOCK, S))
        cosine_RS = unit_DS[:, rows].T @ unit_DS
        same_RS = expert_S[rows, None] == expert_S[None, :]
        own += cosine_RS[same_RS].sum().item()
        between_RS = cosine_RS.masked_fill(same_RS, 0.0)
        other += between_RS.sum().item()
        if N > 1:
            nearest_R = cosine_RS.masked_fill(same_RS, -2.0).amax(1)
            doubles += int((nearest_R > DUPLICATE).sum())
            largest = max(largest, nearest_R.max().item())
    return {
        "within_expert": own / (S * (P - 1)) if P > 1 else None,
        "between_experts": other / (S * (S - P)) if N > 1 else None,
        "largest_between": largest if N > 1 else None,
        "duplicates": doubles / S,
        "scale": None if router.scale is None else router.scale.item(),
    }
