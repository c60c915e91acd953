"""From noise to one forward, written out by hand for a row of six tokens.

The tokens are 10 to 15 and the mask token 50, so that every number says what it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from config.model import ModelConfig
from diffusionlm.diffusion.layout import InputLayout, LogitAlignment, target_positions
from diffusionlm.diffusion.noised_batch import CleanBatch, NoisedBatch
from diffusionlm.models.patterns import AttentionPattern, Bidirectional, BlockDiffusion, Causal

MASK = 50
CLEAN = [10, 11, 12, 13, 14, 15]
DOCUMENTS = [0, 0, 0, 0, 1, 1]


def batch_of(*, documents: bool = False, rows: int = 1, mask_at: int | None = None) -> CleanBatch:
    tokens = torch.tensor([CLEAN] * rows)
    if mask_at is not None:
        tokens[:, mask_at] = MASK
    targets = torch.ones(rows, 6, dtype=torch.bool)
    return CleanBatch(tokens, targets, torch.tensor([DOCUMENTS] * rows) if documents else None)


def draw_of(layout: InputLayout, batch: CleanBatch, masked: list[int]) -> NoisedBatch:
    """The same places of every row, each with its place as weight."""
    masked_BL = np.zeros(tuple(batch.tokens_BL.shape), dtype=np.bool_)
    masked_BL[:, masked] = True
    weights_BL = masked_BL * np.arange(6, dtype=np.float64)
    return layout.build_noised_batch(batch, masked_BL, weights_BL, num_targets=7, denominator=3.5)


def noised(*positions: int) -> list[int]:
    return [MASK if position in positions else token for position, token in enumerate(CLEAN)]


CASES: list[tuple[int | None, LogitAlignment, bool, list[int], list[int], list[int], list[int]]] = [
    # block_length, alignment, documents, masked, inputs, rows, targets' places
    (None, "same_position", False, [0, 2, 5], noised(0, 2, 5), [0, 2, 5], [0, 2, 5]),
    (None, "same_position", True, [0, 2, 5], noised(0, 2, 5), [0, 2, 5], [0, 2, 5]),
    (None, "shifted", False, [1, 2, 5], noised(1, 2, 5), [0, 1, 4], [1, 2, 5]),
    (None, "shifted", True, [1, 2, 5], noised(1, 2, 5), [0, 1, 4], [1, 2, 5]),
    # Two streams: the noisy one at 0 ... 5, the clean one at 6 ... 11.
    (2, "same_position", False, [0, 2, 3, 4], noised(0, 2, 3, 4) + CLEAN, [0, 2, 3, 4], [0, 2, 3, 4]),
    (3, "same_position", True, [0, 3, 5], noised(0, 3, 5) + CLEAN, [0, 3, 5], [0, 3, 5]),
    (1, "same_position", False, [0, 1, 5], noised(0, 1, 5) + CLEAN, [0, 1, 5], [0, 1, 5]),
    # Shifted: the first token of a block (2 and 4) is predicted by the clean token before it (1 and 3, at 7 and 9).
    (2, "shifted", False, [1, 2, 3, 4, 5], noised(1, 2, 3, 4, 5) + CLEAN, [0, 2, 4, 7, 9], [1, 3, 5, 2, 4]),
    # Documents 0-3 and 4-5: blocks of three are 0-2, 3 and 4-5, so that only 3 starts a block after the first.
    (3, "shifted", True, [1, 2, 3, 5], noised(1, 2, 3, 5) + CLEAN, [0, 1, 4, 8], [1, 2, 5, 3]),
    # Blocks of one token with shifted outputs are autoregression, on clean tokens.
    (1, "shifted", False, [1, 3, 5], CLEAN, [0, 2, 4], [1, 3, 5]),
    (1, "shifted", True, [1, 3, 5], CLEAN, [0, 2, 4], [1, 3, 5]),
    # No document is longer than a block: one stream.
    (6, "same_position", False, [0, 2, 5], noised(0, 2, 5), [0, 2, 5], [0, 2, 5]),
    (4, "same_position", True, [0, 2, 5], noised(0, 2, 5), [0, 2, 5], [0, 2, 5]),
    (4, "shifted", True, [1, 2, 5], noised(1, 2, 5), [0, 1, 4], [1, 2, 5]),
    (9, "shifted", False, [1, 2, 5], noised(1, 2, 5), [0, 1, 4], [1, 2, 5]),
]


@pytest.mark.parametrize(("block", "alignment", "documents", "masked", "inputs", "rows", "positions"), CASES)
@pytest.mark.parametrize("count", [1, 3])
def test_written_out(
    block: int | None,
    alignment: LogitAlignment,
    documents: bool,
    masked: list[int],
    inputs: list[int],
    rows: list[int],
    positions: list[int],
    count: int,
) -> None:
    layout, S = InputLayout(block, alignment, MASK), len(inputs)
    batch = batch_of(documents=documents, rows=count)
    draw = draw_of(layout, batch, masked)
    assert draw.inputs_BS.tolist() == [inputs] * count
    assert draw.positions_N.tolist() == [row * S + position for row in range(count) for position in rows]
    assert draw.targets_N.tolist() == [10 + position for _ in range(count) for position in positions]
    assert draw.weights_N.tolist() == [float(position) for _ in range(count) for position in positions]
    assert target_positions(draw, alignment).tolist() == [
        row * 6 + position for row in range(count) for position in positions
    ]
    assert (draw.num_targets, draw.denominator) == (7, 3.5)
    assert (draw.weights_N.dtype, draw.positions_N.dtype) == (torch.float64, torch.int64)
    saved = torch.tensor([DOCUMENTS] * count) if documents else None
    two_streams = BlockDiffusion(block or 0, saved) if S == 12 else None
    one_stream: Any = Causal if (block, alignment) == (1, "shifted") else Bidirectional
    assert_same(draw.pattern, two_streams or one_stream(saved))


def assert_same(pattern: AttentionPattern, expected: AttentionPattern) -> None:
    assert type(pattern) is type(expected)
    S = 6 * expected.positions_per_token
    assert torch.equal(pattern.dense_mask(S).expand(3, S, S), expected.dense_mask(S).expand(3, S, S))
    assert (pattern.documents_BL is None) == (expected.documents_BL is None)


def test_replacements_stand_where_the_mask_would() -> None:
    masked_BL = np.array([[True, False, False, True, False, False]])
    replacement_tokens_BL = np.array([[30, 31, 32, 33, 34, 35]])
    for block, clean in ((None, []), (2, CLEAN)):
        draw = InputLayout(block, mask_token=MASK).build_noised_batch(
            batch_of(),
            masked_BL,
            np.ones((1, 6)),
            num_targets=6,
            denominator=6.0,
            replacement_tokens_BL=replacement_tokens_BL,
        )
        assert draw.inputs_BS.tolist() == [[30, 11, 12, 33, 14, 15, *clean]]
        assert draw.targets_N.tolist() == [10, 13]


def test_documents_only_where_a_row_has_several() -> None:
    """One document a row, whatever its number, needs no mask; padding is a document of its own."""
    layout, tokens = InputLayout(None, mask_token=MASK), torch.tensor([CLEAN, CLEAN])
    everything = torch.ones(2, 6, dtype=torch.bool)
    for documents, restricted in (
        (None, False),
        ([[0] * 6, [1] * 6], False),
        ([[0] * 6, [0, 0, 0, 0, 0, -1]], True),
    ):
        batch = CleanBatch(tokens, everything, None if documents is None else torch.tensor(documents))
        assert draw_of(layout, batch, [1]).pattern.is_unrestricted is not restricted


def test_the_batch_is_not_changed() -> None:
    batch = batch_of(documents=True)
    draw_of(InputLayout(2, "shifted", MASK), batch, [1, 2, 3])
    draw_of(InputLayout(None, "same_position", MASK), batch, [1, 2, 3])
    assert batch.tokens_BL.tolist() == [CLEAN] and batch.document_BL is not None
    assert batch.document_BL.tolist() == [DOCUMENTS]


@pytest.mark.parametrize("alignment", ["same_position", "shifted"])
@pytest.mark.parametrize("block", [None, 1, 4])
def test_a_model_without_mask_token(
    make_config: Callable[..., ModelConfig], alignment: LogitAlignment, block: int | None
) -> None:
    config = make_config(mask_token_id=None, logit_alignment=alignment)
    if (block, alignment) == (1, "shifted"):
        assert InputLayout.from_config(config, block) == InputLayout(1, "shifted", None)
    else:
        with pytest.raises(ValueError, match="mask_token_id"):
            InputLayout.from_config(config, block)
    assert InputLayout.from_config(make_config(logit_alignment=alignment), block) == InputLayout(block, alignment, 18)
