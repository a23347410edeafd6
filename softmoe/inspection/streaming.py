"""Keep distributions of numbers that pass by once: fixed histograms, so that memory does not grow with the data.

Letters: R rows (slots or tokens of some images), K ranks.
"""

import numpy as np

BANDS = (0.6, 0.8, 0.9, 0.95, 0.99)  # central shares, as in the paper's Appendix I
MAX_RANKS = 256


class Histogram:
    """Counts of numbers in equal bins from `low` to `high`; what lies outside is counted in the first and last bin.

    Counts are whole numbers, so batches added in any order give exactly what all numbers at once give.
    """

    def __init__(self, low: float, high: float, bins: int):
        self.low, self.high, self.bins = low, high, bins
        self.counts = np.zeros(bins, dtype=np.int64)
        self.smallest, self.largest = np.inf, -np.inf

    def add(self, values: np.ndarray) -> None:
        if not values.size:
            return
        self.counts += np.bincount(bin_of(values, self.low, self.high, self.bins).ravel(), minlength=self.bins)
        self.smallest = min(self.smallest, float(values.min()))
        self.largest = max(self.largest, float(values.max()))

    @property
    def total(self) -> int:
        return int(self.counts.sum())


class CurveBands:
    """Keeps mean and central bands of cumulative sums: how much the k largest of a row's weights make together.

    At each of up to 256 ranks the values, which lie in 0..1, are counted in `bins` bins. The mean is exact; a quantile
    is off by less than one bin (0.002).
    """

    def __init__(self, length: int, bins: int = 500):
        self.ranks = chosen_ranks(length)
        self.bins = bins
        self.counts_KB = np.zeros((len(self.ranks), bins), dtype=np.int64)
        self.sum_K = np.zeros(len(self.ranks))
        self.rows = 0

    def add(self, cumulative_RM: np.ndarray) -> None:
        """Add rows of cumulative sums over weights in falling order, one column per rank from 1 on."""
        values_RK = cumulative_RM[:, self.ranks - 1]
        offset_K = np.arange(len(self.ranks)) * self.bins
        flat = (bin_of(values_RK, 0.0, 1.0, self.bins) + offset_K).ravel()
        self.counts_KB += np.bincount(flat, minlength=self.counts_KB.size).reshape(self.counts_KB.shape)
        self.sum_K += values_RK.sum(0)
        self.rows += len(values_RK)

    @property
    def mean(self) -> np.ndarray:
        return self.sum_K / max(self.rows, 1)

    def quantile(self, q: float) -> np.ndarray:
        """Return (K,), the value below which a share q of the rows lies, at each rank."""
        below_KB = np.cumsum(self.counts_KB, axis=1)
        wanted = q * self.rows
        bin_K = np.minimum((below_KB < wanted).sum(1), self.bins - 1)
        k = np.arange(len(self.ranks))
        inside_K = self.counts_KB[k, bin_K]
        before_K = below_KB[k, bin_K] - inside_K
        return (bin_K + np.clip((wanted - before_K) / np.maximum(inside_K, 1), 0.0, 1.0)) / self.bins

    def bands(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return {"0.6": (lower, upper), ...}: between them lie the middle 60 % of the rows."""
        return {str(share): (self.quantile((1 - share) / 2), self.quantile((1 + share) / 2)) for share in BANDS}


def chosen_ranks(length: int) -> np.ndarray:
    """Return 1..length, or 256 of them, evenly chosen with both ends."""
    return np.unique(np.linspace(1, length, min(length, MAX_RANKS)).round().astype(np.int64))


def bin_of(values: np.ndarray, low: float, high: float, bins: int) -> np.ndarray:
    """Return the bin of each value: bin i holds low + i * width up to, and without, the next edge."""
    scaled = (np.asarray(values, dtype=np.float64) - low) * (bins / (high - low))
    return np.clip(scaled, 0, bins - 1).astype(np.int64)
