"""What requests change in logits before tokens are sampled.

Shapes: N positions of a forward, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffusionlm.inference.requests import ActiveRequest
from diffusionlm.models.tensors import copy_to_device


class LogitChanges:
    """What requests change in the logits of their output positions: biases, penalties, stop tokens that come too early,
    and tokens that are not allowed."""

    def __init__(self, requests: Sequence[ActiveRequest]) -> None:
        self._allowed_tokens: dict[int, NDArray[np.int64]] = {}
        """Row of the logits -> the tokens that its position may hold."""
        self._changes: list[tuple[int, int, NDArray[np.int64], NDArray[np.float64] | float]] = []
        """First row, row after the last one, tokens, and what is added to their logits, or their repetition penalty."""
        start = 0
        for request in requests:
            for position, token_ids in request.options.allowed_token_ids.items():
                for index in np.flatnonzero(request.output_positions == position).tolist():
                    self._allowed_tokens[start + index] = np.asarray(token_ids, dtype=np.int64)
            end = start + len(request.output_positions)
            if bias := request.options.logit_bias:
                self._changes.append((start, end, np.array([*bias]), np.array([*bias.values()], dtype=np.float64)))
            for first, last, answer_ids in _find_answer_ids(request):
                changes = _compute_penalties(request, answer_ids)
                self._changes += [(start + first, start + last, *change) for change in changes]
            if num_early := int(np.searchsorted(request.output_positions, request.prepared.first_stop_position)):
                stops = np.array([*request.settings.stop_token_ids], dtype=np.int64)
                self._changes.append((start, start + num_early, stops, np.full(len(stops), -np.inf)))
            start = end

    @property
    def is_empty(self) -> bool:
        """True if no logit is changed."""
        return not (self._changes or self._allowed_tokens)

    def apply(self, logits_NV: Tensor, first_row: int) -> Tensor:
        """Change logits of the rows from ``first_row`` on, in place."""
        end_row, device = first_row + len(logits_NV), logits_NV.device
        for start, end, token_ids, values in self._changes:
            rows = slice(max(start - first_row, 0), max(min(end, end_row) - first_row, 0))
            ids = copy_to_device(torch.from_numpy(token_ids), device)
            if isinstance(values, float):
                changed = logits_NV[rows, ids]
                logits_NV[rows, ids] = torch.where(changed > 0.0, changed / values, changed * values)
            else:
                logits_NV[rows, ids] += copy_to_device(torch.from_numpy(values), device).to(logits_NV.dtype)
        for row, token_ids in self._allowed_tokens.items():
            if first_row <= row < end_row:
                ids = copy_to_device(torch.from_numpy(token_ids), device)
                logits_V = logits_NV[row - first_row]
                logits_NV[row - first_row] = torch.full_like(logits_V, float("-inf")).index_copy_(0, ids, logits_V[ids])
        return logits_NV


def _find_answer_ids(request: ActiveRequest) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
    """Tokens of the answer that penalties count, and the first row and the one after the last that they count for: the
    committed ones for all; with speculation for each row also the drafts before it, after which it is verified."""
    answer_ids = request.tokens_L[request.answer_positions[~request.is_masked_L[request.answer_positions]]]
    if request.speculation is None:
        yield 0, len(request.output_positions), answer_ids
        return
    for row in range(len(request.output_positions)):
        yield row, row + 1, np.append(answer_ids, request.speculation.tokens[:row])


def _compute_penalties(
    request: ActiveRequest, answer_ids: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float64] | float]]:
    """Tokens and their repetition penalty, then tokens and what the other penalties add to their logits (the order of
    vLLM). Of a canvas all that is given is the prompt."""
    config = request.settings.config
    is_additive = config.presence_penalty != 0.0 or config.frequency_penalty != 0.0
    if config.repetition_penalty == 1.0 and not is_additive:
        return
    if config.repetition_penalty != 1.0:
        given_ids = np.delete(request.tokens_L, request.masked_positions)
        yield np.union1d(given_ids, answer_ids), config.repetition_penalty
    if is_additive:
        token_ids, counts = np.unique(answer_ids, return_counts=True)
        yield token_ids, -(config.presence_penalty + config.frequency_penalty * counts.astype(np.float64))
