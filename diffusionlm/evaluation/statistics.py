"""Statistics of token counts and log-likelihoods."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tokenizer import Tokenizer

MAX_LOGITS_BYTES = 1 << 30
"""Budget for the float32 logits of a forward of an evaluation; a forward has at least one row."""


@dataclass(frozen=True, kw_only=True)
class LikelihoodReport:
    """The negative log-likelihood of the target tokens of rows, in nats."""

    nats_per_token: float
    """Mean over target tokens."""
    standard_error: float
    """Standard error of `nats_per_token` over rows, and Monte Carlo samples if there are any; infinite for a single
    row."""
    num_tokens: int
    nats: float
    """Sum over target tokens."""
    row_nats: tuple[float, ...]
    """Sum over each row."""
    row_tokens: tuple[int, ...]

    @classmethod
    def from_rows(cls, nats_B: NDArray[np.float64], sizes_B: NDArray[np.int64], **details: Any) -> Self:
        """Sum over rows, of their nats and numbers of target tokens."""
        mean, error = ratio_with_standard_error(nats_B, sizes_B)
        return cls(
            nats_per_token=mean,
            standard_error=error,
            num_tokens=int(sizes_B.sum()),
            nats=float(nats_B.sum()),
            row_nats=tuple(nats_B.tolist()),
            row_tokens=tuple(sizes_B.tolist()),
            **details,
        )


def check_positive(**values: int | None) -> None:
    """Check that each argument is at least 1, or None.

    Raises:
        ValueError: one is not; names it.
    """
    for name, value in values.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} = {value} must be at least 1")


def ratio_with_standard_error(sums_B: NDArray[np.float64], sizes_B: NDArray[np.int64]) -> tuple[float, float]:
    """Ratio of the sums over rows, and its standard error; infinite for a single row.

    The error is computed from the residuals of whole rows, since tokens of one row are not independent.
    """
    total, num_rows = int(sizes_B.sum()), len(sizes_B)
    mean = float(sums_B.sum()) / total
    residuals_B = sums_B - mean * sizes_B
    error = np.sqrt(num_rows / (num_rows - 1) * (residuals_B**2).sum()) / total if num_rows > 1 else np.inf
    return mean, float(error)


def bits_per_byte(
    tokenizer: Tokenizer,
    tokens_BL: NDArray[np.integer[Any]],
    is_scored_BL: NDArray[np.bool_],
    row_nats: Sequence[float],
) -> tuple[float, float, int]:
    """Bits per byte of text, their standard error over rows, and the number of bytes in the scored tokens.

    Special tokens have no bytes; without any byte the first two are infinite.
    """
    bytes_B: NDArray[np.int64] = np.where(is_scored_BL, tokenizer.byte_lengths()[tokens_BL], 0).sum(axis=1)
    if not bytes_B.any():
        return math.inf, math.inf, 0
    nats, error = ratio_with_standard_error(np.array(row_nats), bytes_B)
    return nats / math.log(2), error / math.log(2), int(bytes_B.sum())
