"""Segments are noised as rows of their own are, wherever they are packed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from config.model import ModelConfig
from config.training.objective import (
    BlockDiffusionConfig,
    FixedCountMasking,
    IndependentMasking,
    MaskedDiffusionConfig,
    NextTokenConfig,
    ObjectiveConfig,
)
from diffusionlm.diffusion.noised_batch import CleanBatch, NoisedBatch, NoiseKey
from diffusionlm.diffusion.objectives import build_objective
from diffusionlm.diffusion.segments import NoiseSequences, segment_starts
from tests.conftest import MakeConfig

MASK, L, NUM_SEGMENTS = 30, 24, 7

OBJECTIVES: dict[str, ObjectiveConfig] = {
    "masked": MaskedDiffusionConfig(),
    "masked-complementary": MaskedDiffusionConfig(estimator=FixedCountMasking(complementary=True)),
    "masked-rows": MaskedDiffusionConfig(normalizer="rows", estimator=IndependentMasking()),
    "masked-by-masked-rows": MaskedDiffusionConfig(
        normalizer="masked_rows", estimator=IndependentMasking(times="antithetic")
    ),
    "masked-mean": MaskedDiffusionConfig(normalizer="masked"),
    "masked-random": MaskedDiffusionConfig(estimator=FixedCountMasking(replace_with="random")),
    "blocks": BlockDiffusionConfig(block_length=3),
    "blocks-rows": BlockDiffusionConfig(block_length=2, normalizer="rows"),
    "blocks-document": BlockDiffusionConfig(block_length=2, estimator=IndependentMasking(draw_per="document")),
    "blocks-several": BlockDiffusionConfig(block_length=(1, 4, 50)),
    "next-token": NextTokenConfig(),
}


def packed_batch() -> CleanBatch:
    """Four documents of seven segments in two rows, with prompts, a segment without a target, and padding."""
    sizes: list[list[tuple[int, ...]]] = [[(5, 3), (2, 4, 1)], [(9,), (6,)]]  # segments of each document of each row
    documents, segments = torch.full((2, L), -1), torch.full((2, L), -1)
    for row, lengths_by_document in enumerate(sizes):
        position, segment = 0, 0
        for document, lengths in enumerate(lengths_by_document):
            for length in lengths:
                documents[row, position : position + length] = document
                segments[row, position : position + length] = segment
                position, segment = position + length, segment + 1
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, MASK, (2, L), generator=generator)
    targets = (torch.rand(2, L, generator=generator) < 0.7) & (segments >= 0)
    targets[0, 5:8] = False
    return CleanBatch(tokens, targets, documents, segments)


def separate_documents(batch: CleanBatch) -> list[CleanBatch]:
    """Each document in a row of its own, in order."""
    assert batch.document_BL is not None
    parts = []
    for row in range(len(batch.tokens_BL)):
        for document in range(int(batch.document_BL[row].max()) + 1):
            is_here = batch.document_BL[row] == document
            parts.append(
                CleanBatch(*(tensor[row, is_here][None] for tensor in vars(batch).values() if tensor is not None))
            )
    return parts


def draws(name: str, batches: list[CleanBatch], model: ModelConfig, step: int = 3) -> list[NoisedBatch]:
    objective, first, noised = build_objective(OBJECTIVES[name], model), 0, []
    for batch in batches:
        noised.append(objective.build_noised_batch(batch, NoiseKey(1, step, first, NUM_SEGMENTS)))
        first += len(NoiseSequences.from_batch(batch).batch.tokens_BL)
    assert first == NUM_SEGMENTS
    return noised


def test_segments_written_out() -> None:
    segments = torch.tensor([[3, 3, 5, 5, 5, -1], [0, 1, 1, -1, -1, -1]])
    assert [segment_starts(row.numpy()).tolist() for row in segments] == [[0, 2], [0, 1]]
    tokens, targets = torch.arange(12).view(2, 6), segments % 2 == 1
    sequences = NoiseSequences.from_batch(CleanBatch(tokens, targets & (segments >= 0), None, segments))
    assert sequences.batch.tokens_BL.tolist() == [[0, 1, 0], [2, 3, 4], [6, 0, 0], [7, 8, 0]]
    assert sequences.batch.loss_mask_BL.int().tolist() == [[1, 1, 0], [1, 1, 1], [0, 0, 0], [1, 1, 0]]
    values = np.arange(12).reshape(2, 6)
    assert sequences.scatter(sequences.gather(values)).tolist() == [[0, 1, 2, 3, 4, 0], [6, 7, 8, 0, 0, 0]]


def test_rows_of_padding_have_no_segment(make_config: MakeConfig) -> None:
    padding = torch.full((2, 5), -1)
    batch = CleanBatch(torch.zeros_like(padding), padding > 0, padding, padding)
    assert NoiseSequences.from_batch(batch).batch.tokens_BL.shape == (0, 0)
    for config in OBJECTIVES.values():
        model = make_config(vocab_size=MASK + 1, mask_token_id=MASK, logit_alignment="shifted")
        noised = build_objective(config, model).build_noised_batch(batch, NoiseKey(1, 0, 2, 5))
        assert noised.denominator == noised.num_targets == len(noised.positions_N) == 0


@pytest.mark.parametrize(
    ("name", "alignment"),
    [("next-token", "shifted"), *((name, "same_position") for name in OBJECTIVES if name != "next-token"),
     ("masked", "shifted"), ("blocks", "shifted")],
)  # fmt: skip
def test_packed_documents_get_the_noise_of_separate_ones(make_config: MakeConfig, name: str, alignment: str) -> None:
    """Noisy tokens, targets, weights and denominators: the same in two rows and in four."""
    model = make_config(vocab_size=MASK + 1, mask_token_id=MASK, logit_alignment=alignment)
    batch = packed_batch()
    [whole], parts = draws(name, [batch], model), draws(name, separate_documents(batch), model)
    assert whole.denominator == sum(part.denominator for part in parts) > 0
    assert whole.num_targets == sum(part.num_targets for part in parts)
    copies = len(whole.inputs_BS) // 2
    assert batch.document_BL is not None
    is_token = batch.document_BL.ge(0).repeat(copies, 1)
    expected = torch.cat([part.inputs_BS[copy, : part.inputs_BS.shape[1] // part.pattern.positions_per_token]
                          for copy in range(copies) for part in parts])  # fmt: skip
    assert torch.equal(whole.inputs_BS[:, :L][is_token], expected)
    if copies == 1:
        pairs = [(draw.targets_N.tolist(), draw.weights_N.tolist()) for draw in parts]
        assert sorted(zip(whole.targets_N.tolist(), whole.weights_N.tolist(), strict=True)) == sorted(
            pair for targets, weights in pairs for pair in zip(targets, weights, strict=True)
        )
