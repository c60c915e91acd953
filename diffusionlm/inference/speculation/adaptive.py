"""The number of drafts with which decoding is fastest (``speculation = "auto"``).

A forward that verifies k drafts commits 1 + s_1 + ... + s_k tokens, where s_j is the probability that the first j are
right. With the probability s_k all are, and its new drafts are verified next; else the next forward only drafts. Its
time is that of its inputs: seconds of a step = fixed + per input x inputs of all requests. The decoder measures both:
acceptance in verified drafts, and times in steps.

Shapes: D numbers of drafts, 0 to the largest.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MEMORY = 64
"""Measurements that an average is of: later ones replace earlier ones."""
PRIOR_ACCEPTANCE = 0.9
"""Of drafts at an offset where none has been verified; high, so that they are tried. It is below 1, so all averages
are."""
NUM_SKIPPED_STEPS = 4
"""First steps of a decoder: they allocate memory and compile kernels."""
NUM_TRIED_STEPS = 4
"""Steps after these that draft in turn nothing and as much as possible, so that the time of an input can be told."""
MAX_SLOWDOWN = 3.0
"""Times above the average by more than this factor count as this one: the machine did something else."""
MIN_VARIANCE = 1e-5
"""Of the inputs of steps, relative to the square of their mean. With less, the time of an input is not known anymore,
and it goes to 0: longer drafts are tried."""


class DraftPolicy:
    """Chooses the numbers of drafts of a decoder's requests, from what it measures."""

    def __init__(self) -> None:
        self._acceptance: list[float] = []
        """Of the drafts at each offset behind right ones."""
        self._num_verified: list[int] = []
        self._num_steps = -NUM_SKIPPED_STEPS
        self._num_requests = 1
        """Of the last step."""
        self._mean_inputs = self._mean_seconds = self._variance = self._covariance = 0.0
        self._lengths: dict[tuple[int, int], tuple[int, int]] = {}
        """Arguments of `choose_length` -> numbers of drafts until the next measurement."""

    def record_step(self, num_requests: int, num_inputs: int, seconds: float) -> None:
        """Record the time of a step without long prompts."""
        self._lengths.clear()
        self._num_requests = num_requests
        self._num_steps += 1
        if self._num_steps < 1:
            return
        if self._num_steps > 1:
            seconds = min(seconds, MAX_SLOWDOWN * self._mean_seconds)
        weight = 1 / min(self._num_steps, MEMORY)
        more_inputs, more_seconds = num_inputs - self._mean_inputs, seconds - self._mean_seconds
        self._mean_inputs += weight * more_inputs
        self._mean_seconds += weight * more_seconds
        self._variance = (1 - weight) * (self._variance + weight * more_inputs**2)
        self._covariance = (1 - weight) * (self._covariance + weight * more_inputs * more_seconds)

    def record_drafts(self, num_drafts: int, num_right: int) -> None:
        """Record that of the drafts of a request so many, from the left, were right."""
        for offset in range(min(num_right + 1, num_drafts)):
            if offset == len(self._acceptance):
                self._acceptance.append(PRIOR_ACCEPTANCE)
                self._num_verified.append(0)
            self._num_verified[offset] += 1
            weight = 1 / min(self._num_verified[offset] + 1, MEMORY)
            self._acceptance[offset] += weight * ((offset < num_right) - self._acceptance[offset])

    def choose_length(self, max_length: int, num_extra: int, *, verifies: bool) -> int:
        """Number of drafts of the next forward of a request.

        Args:
            max_length: largest number.
            num_extra: inputs of a forward that drafts beside its drafts and what it verifies.
            verifies: it verifies drafts.
        """
        if (max_length, num_extra) not in self._lengths:
            self._lengths[max_length, num_extra] = self._choose_lengths(max_length, num_extra)
        return self._lengths[max_length, num_extra][verifies]

    def _choose_lengths(self, max_length: int, num_extra: int) -> tuple[int, int]:
        if self._num_steps < NUM_TRIED_STEPS:
            length = max_length * (self._num_steps % 2)
            return length, length
        acceptance = self._acceptance[:max_length]
        acceptance += [PRIOR_ACCEPTANCE] * (max_length - len(acceptance))
        are_right_D = np.cumprod([1.0, *acceptance], dtype=np.float64)
        per_input = max(self._covariance / (self._variance + MIN_VARIANCE * self._mean_inputs**2), 0.0)
        fixed = max(self._mean_seconds - per_input * self._mean_inputs, 0.0)
        return find_best_lengths(are_right_D, fixed, per_input * self._num_requests, num_extra)


def find_best_lengths(
    are_right_D: NDArray[np.float64], fixed: float, per_input: float, num_extra: int
) -> tuple[int, int]:
    """Numbers of drafts of a forward that verifies none, and of one that verifies some, with the most tokens per
    second; the fewest among equals.

    A round begins without drafts and ends where one is wrong, or where none were drafted.

    Args:
        are_right_D: s_0 = 1, s_1, ...; those of drafts below 1.
        fixed: seconds of a forward.
        per_input: more of them for each input.
        num_extra: as in `DraftPolicy.choose_length`.
    """
    lengths_D = np.arange(len(are_right_D))
    has_drafts_D = lengths_D > 0
    tokens_D, masks_D = are_right_D.cumsum(), lengths_D + num_extra * has_drafts_D
    verified_D, first_D1 = 1 + lengths_D, has_drafts_D[:, None]
    repeats_D = np.append(0.0, 1.0 / (1.0 - are_right_D[1:]))
    later_DD = np.outer(are_right_D * has_drafts_D, repeats_D)
    """Forwards of a round that verify drafts of a forward that verified some."""
    num_tokens_DD = 1.0 + first_D1 * tokens_D[:, None] + later_DD * tokens_D
    num_forwards_DD = 1.0 + first_D1 + later_DD
    num_inputs_DD = 1.0 + masks_D[:, None] + first_D1 * (verified_D[:, None] + masks_D)
    num_inputs_DD = num_inputs_DD + later_DD * (verified_D + masks_D)
    rates_DD = num_tokens_DD / (fixed * num_forwards_DD + per_input * num_inputs_DD)
    first, later = np.unravel_index(rates_DD.argmax(), rates_DD.shape)
    return int(first), int(later)
