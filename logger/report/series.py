"""Series of values over steps: downsampling and smoothing. N points."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from logger.pages import Floats


@dataclass(frozen=True)
class Series:
    """Values at increasing steps; NaN: missing."""

    steps_N: Floats
    values_N: Floats

    @property
    def is_empty(self) -> bool:
        """True if no value is finite."""
        return not np.isfinite(self.values_N).any()

    @property
    def num_missing(self) -> int:
        """Number of points that are null, NaN or infinite."""
        return int((~np.isfinite(self.values_N)).sum())

    @property
    def last(self) -> tuple[float, float] | None:
        """Step and value of the last finite point."""
        indices = np.flatnonzero(np.isfinite(self.values_N))
        return (float(self.steps_N[indices[-1]]), float(self.values_N[indices[-1]])) if len(indices) else None


def downsample(values_N: Floats, num_buckets: int) -> NDArray[np.int64]:
    """Return indices of points that draw the same curve.

    These are the minimum and maximum of each bucket, the first and the last point. A bucket without finite values keeps
    one index, as a gap. Short series keep all indices.
    """
    number = len(values_N)
    if number <= 2 * num_buckets + 2:
        return np.arange(number)
    least_N = np.where(np.isfinite(values_N), values_N, np.inf)
    greatest_N = np.where(np.isfinite(values_N), values_N, -np.inf)
    edges = np.linspace(0, number, num_buckets + 1).astype(np.int64)
    indices = {0, number - 1}
    for start, end in pairwise(edges.tolist()):
        indices |= {start + int(least_N[start:end].argmin()), start + int(greatest_N[start:end].argmax())}
    return np.array(sorted(indices))


def moving_average(values_N: Floats) -> Floats:
    """Return centered means over a fiftieth of the points, at least five; NaN is ignored.

    The window shrinks symmetrically at the start, where curves are steep, and is one-sided at the end.
    """
    number = len(values_N)
    reach = max(2, number // 100)
    is_there_N = np.isfinite(values_N)
    sums = np.concatenate([[0.0], np.cumsum(np.where(is_there_N, values_N, 0.0))])
    counts = np.concatenate([[0], np.cumsum(is_there_N)])
    indices_N = np.arange(number)
    reach_N = np.minimum(reach, indices_N)
    first_N, end_N = indices_N - reach_N, np.minimum(number, indices_N + reach_N + 1)
    counts_N = counts[end_N] - counts[first_N]
    means_N: Floats = (sums[end_N] - sums[first_N]) / np.maximum(1, counts_N)
    return np.where(is_there_N & (counts_N > 0), means_N, np.nan)
