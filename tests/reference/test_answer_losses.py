"""Losses of answers: EOS padding, and conversations against forwards of a second implementation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from config.training.objective import (
    BlockDiffusionConfig,
    FixedCountMasking,
    IndependentMasking,
    MaskedDiffusionConfig,
    NextTokenConfig,
    ObjectiveConfig,
)
from diffusionlm.diffusion.layout import InputLayout
from diffusionlm.diffusion.noised_batch import CleanBatch, NoisedBatch, NoiseKey
from diffusionlm.diffusion.objectives import build_objective
from diffusionlm.diffusion.segments import NoiseSequences
from diffusionlm.evaluation.nelbo import NelboEstimator, NelboReport, compute_masked_nll
from diffusionlm.models.transformer import Transformer
from diffusionlm.training.metrics import sum_loss_parts
from tests.conftest import MakeModel
from tests.reference.enumeration import (
    PlainModel,
    StandIn,
    assert_mean,
    log_probabilities,
    loss_and_gradient,
    score_batch,
    table_config,
)

# ----------------------------------------------------------------------------------------------------------------------
# Values by hand


def losses(config: ObjectiveConfig, batch: CleanBatch, model: Any, steps: int = 60) -> np.ndarray:
    objective, values = build_objective(config, model.config), []
    for step in range(steps):
        draw = objective.build_noised_batch(batch, NoiseKey(5, step, 0, len(batch.tokens_BL)))
        values.append(float(score_batch(model, objective, draw, draw.denominator).loss_sum))
    return np.array(values)


PADDED = CleanBatch(
    torch.tensor([[3, 3, 3, 0, 0, 2, 2, 2]]),
    torch.tensor([[False] * 3 + [True] * 5]),
    is_eos_padding_BL=torch.tensor([[False] * 5 + [True] * 3]),
)
"""An answer of 2 tokens of 1 nat and EOS padding of 3 tokens of 0.01 nats."""
EOS_PADDING_MODEL: Any = StandIn(
    lambda inputs_RL, targets_R: torch.tensor([1.0, 9.0, 0.01, 9.0])[targets_R], table_config(4, 16)
)


@pytest.mark.parametrize("loss", ["targets", "rows"])
@pytest.mark.parametrize(("weight", "expected"), [(1.0, 2.03 / 5), (0.5, 2.015 / 3.5), (0.0, 1.0)])
def test_eos_padding_dilutes_the_loss_by_its_weight(loss: Any, weight: float, expected: float) -> None:
    config = MaskedDiffusionConfig(normalizer=loss, eos_padding_weight=weight)
    # All targets share one level: their cross-entropies, in expectation.
    values = losses(config, PADDED, EOS_PADDING_MODEL)
    assert_mean(values, expected, relative_error=0.1)


@pytest.mark.parametrize(
    "config", [MaskedDiffusionConfig(), MaskedDiffusionConfig(normalizer="rows", eos_padding_weight=0.3)]
)
def test_answer_and_eos_padding_are_reported_apart(config: MaskedDiffusionConfig) -> None:
    objective, total = build_objective(config, EOS_PADDING_MODEL.config), torch.zeros(2, 3, dtype=torch.float64)
    for step in range(100):
        draw = objective.build_noised_batch(PADDED, NoiseKey(1, step, 0, 1))
        total += sum_loss_parts(draw, score_batch(EOS_PADDING_MODEL, objective, draw, 1.0).nll_N)
    (answer, eos_padding, _), (answer_denominator, eos_padding_denominator, _) = total.tolist()
    assert answer_denominator + eos_padding_denominator == pytest.approx(100 * draw.denominator)
    assert answer / answer_denominator == pytest.approx(1.0, rel=0.15)
    assert eos_padding / eos_padding_denominator == pytest.approx(0.01, rel=0.15)


def report_of(model: Any, batch: CleanBatch, block_length: int | None = None, samples: int = 5) -> NelboReport:
    layout = InputLayout.from_config(model.config, block_length)
    estimator = NelboEstimator(layout, batch, samples, 0, batch_size=2)
    return estimator.build_report([estimator.run_forward(model, index) for index in range(estimator.num_forwards)])


def test_validation_reports_eos_padding_apart() -> None:
    report = report_of(EOS_PADDING_MODEL, PADDED, samples=300)
    assert report.nats_per_token == pytest.approx(1.0, rel=0.1) and report.num_tokens == 2
    assert report.eos_padding_nats_per_token == pytest.approx(0.01, rel=0.1) and report.num_eos_padding_tokens == 3
    is_padding_BL = PADDED.is_eos_padding_BL
    assert is_padding_BL is not None
    with pytest.raises(ValueError, match="no answer token"):
        report_of(EOS_PADDING_MODEL, CleanBatch(PADDED.tokens_BL, is_padding_BL, is_eos_padding_BL=is_padding_BL))


# ----------------------------------------------------------------------------------------------------------------------
# Conversations of several answers against forwards of one block each

VOCAB, MASK, L = 7, 6, 20
DOCUMENTS = [[(3, 2), (4, 3)], [(2, 1)], [(1, 5), (1, 1)]]
"""Of each document the segments, as (tokens before the answer, tokens of the answer); 23 tokens in all."""
EXACT: dict[str, Any] = {"rtol": 0.0, "atol": 1e-12}


def conversations(num_padding: int = 0, seed: int = 0) -> list[CleanBatch]:
    """Each document as a row of its own; the last answer of each has ``num_padding`` tokens of EOS padding."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for segments in DOCUMENTS:
        targets, is_padding, numbers = [], [], []
        for number, (before, answer) in enumerate(segments):
            filled = num_padding if number == len(segments) - 1 else 0
            targets += [False] * before + [True] * (answer + filled)
            is_padding += [False] * (before + answer) + [True] * filled
            numbers += [number] * (before + answer + filled)
        tokens = torch.randint(0, MASK, (1, len(targets)), generator=generator)
        batches.append(
            CleanBatch(
                tokens,
                torch.tensor([targets]),
                torch.zeros_like(tokens),
                torch.tensor([numbers]),
                torch.tensor([is_padding]) if num_padding else None,
            )
        )
    return batches


def pack(batches: Sequence[CleanBatch], padding: int = 2) -> CleanBatch:
    """All documents in one row, and padding."""
    lengths = [batch.tokens_BL.shape[1] for batch in batches]

    def join(values: list[Tensor], value: int) -> Tensor:
        return torch.cat([*values, torch.full((1, padding), value, dtype=values[0].dtype)], dim=1)

    first_segments = np.cumsum(
        [0, *(int(batch.segment_BL.max()) + 1 for batch in batches if batch.segment_BL is not None)]
    )
    is_padding = [batch.is_eos_padding_BL for batch in batches if batch.is_eos_padding_BL is not None]
    return CleanBatch(
        join([batch.tokens_BL for batch in batches], 0),
        join([batch.loss_mask_BL for batch in batches], 0),
        join([torch.full((1, length), number) for number, length in enumerate(lengths)], -1),
        join([batch.segment_BL + int(first) for batch, first in zip(batches, first_segments, strict=False)
              if batch.segment_BL is not None], -1),
        join(is_padding, 0) if is_padding else None,
    )  # fmt: skip


def place(batches: Sequence[CleanBatch], padding: int = 2) -> list[CleanBatch]:
    """Each document in a row of its own, where `pack` puts it: the rest of the row is padding."""
    packed, start, rows = pack(batches, padding), 0, []
    assert packed.document_BL is not None and packed.segment_BL is not None
    for number in range(len(batches)):
        is_here = packed.document_BL == number
        is_padding = None if packed.is_eos_padding_BL is None else packed.is_eos_padding_BL & is_here
        rows.append(
            CleanBatch(
                packed.tokens_BL,
                packed.loss_mask_BL & is_here,
                torch.where(is_here, 0, -1),
                torch.where(is_here, packed.segment_BL, -1),
                is_padding,
            )
        )
        start += int(is_here.sum())
    return rows


@pytest.fixture(scope="module", params=["same_position", "shifted"])
def model(tiny_model: MakeModel, request: pytest.FixtureRequest) -> Transformer:
    vocabulary = {"vocab_size": VOCAB, "mask_token_id": MASK, "eos_token_id": 0, "pad_token_id": 0}
    return tiny_model(torch.float64, scale=0.4, logit_alignment=request.param, **vocabulary)


def block_starts(segments: Sequence[tuple[int, int]], block_length: int, num_padding: int) -> list[int]:
    starts, first = [], 0
    for number, (before, answer) in enumerate(segments):
        end = first + before + answer + (num_padding if number == len(segments) - 1 else 0)
        starts += list(range(first, end, block_length))
        first = end
    return [*starts, first]


@torch.no_grad()
@pytest.mark.parametrize("block_length", [1, 2, 3, 4, 7, 50])
def test_every_answer_token_equals_a_forward_of_its_block(model: Transformer, block_length: int) -> None:
    """Clean tokens before the block, the noisy block, nothing behind it: inner answers end their block.

    Packed behind other documents; positions are those of the row, so the values are exact.
    """
    plain, shift = PlainModel(model), int(model.config.logit_alignment == "shifted")
    documents, layout = conversations(), InputLayout.from_config(model.config, block_length)
    packed = pack(documents)
    masked = (
        packed.loss_mask_BL & (torch.rand(packed.tokens_BL.shape) < 0.7) & torch.from_numpy(layout.maskable(packed))
    )
    nll = torch.from_numpy(compute_masked_nll(model, layout, packed, masked.numpy()))[0]
    assert int((~nll.isnan()).sum()) == int(masked.sum()) > 5
    start = 0
    for segments, document in zip(DOCUMENTS, documents, strict=True):
        starts = block_starts(segments, block_length, 0)
        x = document.tokens_BL[0]
        block_of = torch.tensor([sum(place >= s for s in starts) for place in range(len(x))])
        for first, last in pairwise(starts):
            noisy = torch.where(masked[0, start + first : start + last], MASK, x[first:last])
            inputs = torch.cat([x[:first], noisy])[None]
            visible = block_of[:last, None] >= block_of[None, :last]
            logits, _ = plain(inputs, torch.arange(start, start + last), visible)
            for position in range(first, last):
                if masked[0, start + position]:
                    expected = -log_probabilities(logits[0, position - shift])[x[position]]
                    torch.testing.assert_close(nll[start + position], expected, **EXACT)
        start += len(x)


EOS_PADDING_CASES = [(0, 1.0), (2, 0.25), (3, 0.0)]
"""Tokens of EOS padding, and their weight."""


def objectives(alignment: str, weight: float) -> list[ObjectiveConfig]:
    blocks: list[ObjectiveConfig] = [
        BlockDiffusionConfig(block_length=length, eos_padding_weight=weight) for length in (1, 2, 3, 4, 5, 8, 30)
    ]
    others: list[ObjectiveConfig] = [
        MaskedDiffusionConfig(eos_padding_weight=weight),
        MaskedDiffusionConfig(normalizer="rows", eos_padding_weight=weight, estimator=IndependentMasking()),
        BlockDiffusionConfig(block_length=3, normalizer="rows", eos_padding_weight=weight),
        BlockDiffusionConfig(
            block_length=2, eos_padding_weight=weight, estimator=FixedCountMasking(complementary=True)
        ),
        BlockDiffusionConfig(
            block_length=2, eos_padding_weight=weight, estimator=IndependentMasking(draw_per="document")
        ),
        BlockDiffusionConfig(block_length=(1, 4, 50), eos_padding_weight=weight),
        MaskedDiffusionConfig(eos_padding_weight=weight, estimator=FixedCountMasking(replace_with="random")),
    ]
    if weight == 1.0:
        others += [MaskedDiffusionConfig(normalizer=name) for name in ("masked", "masked_rows")]
    next_token: list[ObjectiveConfig] = [NextTokenConfig(eos_padding_weight=weight)] if alignment == "shifted" else []
    return [*blocks, *others, *next_token]


def draws_of(objective: Any, batches: Sequence[CleanBatch], step: int = 4) -> list[NoisedBatch]:
    counts = [len(NoiseSequences.from_batch(batch).batch.tokens_BL) for batch in batches]
    firsts = np.cumsum([0, *counts]).tolist()
    return [
        objective.build_noised_batch(batch, NoiseKey(2, step, first, firsts[-1]))
        for batch, first in zip(batches, firsts, strict=False)
    ]


@pytest.mark.parametrize(("num_padding", "weight"), EOS_PADDING_CASES)
def test_packed_conversations_equal_separate_ones(model: Transformer, num_padding: int, weight: float) -> None:
    """Loss and gradient of a row of three documents, and of three rows of one document where they are in the row.

    Moved to the row's start, the rotary angles are rounded differently, in fp32.
    """
    separate = conversations(num_padding)
    for config in objectives(model.config.logit_alignment, weight):
        objective = build_objective(config, model.config)
        loss, gradient = loss_and_gradient(model, objective, draws_of(objective, [pack(separate)]))
        assert loss > 0
        cases = [(place(separate), 1e-11, 1e-13)]
        if isinstance(config, MaskedDiffusionConfig):
            cases.append((separate, 1e-5, 1e-6))
        for batches, rtol, atol in cases:
            expected_loss, expected = loss_and_gradient(model, objective, draws_of(objective, batches))
            torch.testing.assert_close(loss, expected_loss, rtol=rtol, atol=0.0)
            for ours, theirs in zip(gradient, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


@torch.no_grad()
@pytest.mark.parametrize("block_length", [None, 1, 3, 4])
def test_validation_of_packed_conversations_equals_that_of_separate_ones(
    model: Transformer, block_length: int | None
) -> None:
    rows = place(conversations(2))
    present = [name for name, value in vars(rows[0]).items() if value is not None]
    tensors: dict[str, Any] = {name: torch.cat([getattr(row, name) for row in rows]) for name in present}
    together = CleanBatch(**tensors)
    separate, packed = (
        report_of(model, batch, block_length, samples=3) for batch in (together, pack(conversations(2)))
    )
    assert packed.nats == pytest.approx(separate.nats, rel=1e-11) and packed.num_tokens == separate.num_tokens
    assert packed.eos_padding_nats_per_token == pytest.approx(separate.eos_padding_nats_per_token, rel=1e-11)
    np.testing.assert_allclose(packed.by_masked_fraction, separate.by_masked_fraction, rtol=1e-11)
