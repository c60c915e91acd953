"""How much a model uses prompts: the bound of answers to the prompts of other conversations, minus that to their own.

Shapes: B rows, L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffusionlm.data.packing import Row
from diffusionlm.evaluation.nelbo import NelboReport
from diffusionlm.evaluation.statistics import ratio_with_standard_error


@dataclass(frozen=True)
class PromptGap:
    """The gap of prompts. It is positive if the model reads them."""

    nats_per_token: float
    """Per answer token."""
    standard_error: float
    """Over rows, of the paired differences; infinite for a single row."""
    num_rows: int
    """Rows with another prompt. The others fit none, and count as 0."""


def exchange_prompts(rows: Sequence[Row]) -> tuple[list[Row], int]:
    """Give each row of one conversation the prompt of the next row that has another prompt and fits.

    The prompt is what precedes the first target. Padding stays at the end.

    Returns:
        The rows, and how many have another prompt.
    """
    prompts = [row.tokens_L[: int(row.loss_mask_L.argmax())] for row in rows]
    exchanged, num_exchanged = [], 0
    for index, row in enumerate(rows):
        own = prompts[index]
        free = int((row.document_ids_L < 0).sum())
        others = (prompts[(index + offset) % len(rows)] for offset in range(1, len(rows)))
        other = next((item for item in others if len(item) <= len(own) + free and not np.array_equal(item, own)), None)
        num_exchanged += other is not None
        exchanged.append(row if other is None else _replace_prompt(row, len(own), other))
    return exchanged, num_exchanged


def _replace_prompt(row: Row, num_own: int, prompt_P: NDArray[np.int32]) -> Row:
    assert row.segment_ids_L is not None and row.is_fill_L is not None, "the row is a conversation"
    length, shift = len(row.tokens_L), len(prompt_P) - num_own
    size = int((row.document_ids_L >= 0).sum())
    padding = length - size - shift

    def move(values_L: NDArray[Any], prompt_value: int, padding_value: int) -> NDArray[Any]:
        prompt, end = np.full(len(prompt_P), prompt_value), np.full(padding, padding_value)
        return np.concatenate((prompt, values_L[num_own:size], end)).astype(values_L.dtype)

    tokens_L = move(row.tokens_L, 0, int(row.tokens_L[-1]) if size < length else 0)
    tokens_L[: len(prompt_P)] = prompt_P
    return replace(
        row,
        tokens_L=tokens_L,
        document_ids_L=move(row.document_ids_L, 0, -1),
        loss_mask_L=move(row.loss_mask_L, 0, 0),
        segment_ids_L=move(row.segment_ids_L, 0, -1),
        is_fill_L=move(row.is_fill_L, 0, 0),
    )


def compute_prompt_gap(
    own: NelboReport, exchanged: NelboReport, sizes_B: NDArray[np.int64], num_exchanged: int
) -> PromptGap:
    """Compute the gap from the reports of the rows and of the exchanged ones.

    Args:
        sizes_B: scored tokens of each row, without fill.
    """
    differences_B = np.array(exchanged.row_nats) - np.array(own.row_nats)
    return PromptGap(*ratio_with_standard_error(differences_B, sizes_B), num_exchanged)
