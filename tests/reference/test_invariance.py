"""Loss and gradient of a step do not depend on ranks, micro-batches or padding: every objective, text and chats, fp64.

`integration/test_objectives_of_runs.py` repeats it for the micro-batches of a real training step, and
`distributed/test_training_ranks.py` for processes that reduce their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from config.training.objective import (
    AllMasked,
    BlockDiffusionConfig,
    BlockLengthStage,
    FixedCountMasking,
    IndependentMasking,
    MaskedDiffusionConfig,
    NextTokenConfig,
    ObjectiveConfig,
)
from diffusionlm.data.loader import Loader
from diffusionlm.data.packing import Row
from diffusionlm.data.reader import ReaderPosition
from diffusionlm.diffusion.layout import target_positions
from diffusionlm.diffusion.noised_batch import CleanBatch, NoisedBatch, NoiseKey
from diffusionlm.diffusion.objectives import build_objective
from diffusionlm.models.patterns import Causal
from diffusionlm.models.transformer import Transformer
from tests.conftest import MakeModel
from tests.reference.enumeration import loss_and_gradient

ROWS, L, MASK = 8, 10, 18
KEY = {"seed": 3, "step": 5, "num_sequences_in_step": ROWS}

OBJECTIVES: dict[str, ObjectiveConfig] = {
    "masked": MaskedDiffusionConfig(),
    "masked-document": MaskedDiffusionConfig(estimator=FixedCountMasking(draw_per="document")),
    "masked-rows": MaskedDiffusionConfig(normalizer="rows", estimator=IndependentMasking()),
    "masked-soft": MaskedDiffusionConfig(
        normalizer="rows", label_smoothing=0.1, estimator=IndependentMasking(times="antithetic"), z_loss=1e-3
    ),
    "masked-by-masked-rows": MaskedDiffusionConfig(
        normalizer="masked_rows", estimator=IndependentMasking(range=(0.1, 0.9), times="uniform")
    ),
    "masked-runs": MaskedDiffusionConfig(estimator=FixedCountMasking(contiguous_probability=0.5, reweight_cap=3.0)),
    "block-3": BlockDiffusionConfig(block_length=3),
    "block-complementary": BlockDiffusionConfig(block_length=2, estimator=FixedCountMasking(complementary=True)),
    "block-sdar": BlockDiffusionConfig(
        block_length=4, estimator=IndependentMasking(draw_per="document", weight="inverse_p")
    ),
    "block-mean": BlockDiffusionConfig(
        block_length=4, normalizer="masked", estimator=IndependentMasking(draw_per="row")
    ),
    "block-stages": BlockDiffusionConfig(
        stages=(BlockLengthStage(from_step=0, block_length=1), BlockLengthStage(from_step=5, block_length=4))
    ),
    "next-token": NextTokenConfig(label_smoothing=0.1),
}
CHAT_OBJECTIVES: dict[str, ObjectiveConfig] = {
    "masked": MaskedDiffusionConfig(eos_padding_weight=0.5),
    "per answer": MaskedDiffusionConfig(normalizer="rows", estimator=IndependentMasking(), eos_padding_weight=0.5),
    "blocks": BlockDiffusionConfig(block_length=3, eos_padding_weight=0.5),
    "next token, too": BlockDiffusionConfig(block_length=3, normalizer="rows", next_token_weight=0.3),
    "one forward": BlockDiffusionConfig(block_length=3, clean_attention="token", next_token_weight=0.3),
    "one forward, outputs": BlockDiffusionConfig(
        block_length=3, clean_attention="token", next_token_weight=2.0, normalizer="outputs", estimator=AllMasked()
    ),
    "pairs": BlockDiffusionConfig(block_length=2, normalizer="rows", estimator=FixedCountMasking(complementary=True)),
}
CHAT_SEGMENTS = [[(3, 2), (1, 4)], [(1, 1)], [(10, 0)], [(2, 3), (0, 4)]]
"""By row: (tokens of the prompt, of the answer) of each segment; the third row has no target."""


@pytest.fixture(scope="module")
def models(tiny_model: MakeModel) -> dict[str, Transformer]:
    alignments = ("same_position", "shifted")
    return {
        "token-causal": tiny_model(torch.float64, clean_alignment="shifted"),
        **{alignment: tiny_model(torch.float64, logit_alignment=alignment) for alignment in alignments},
    }


@pytest.fixture
def batch() -> CleanBatch:
    """Packed documents, prompts, a row without targets, and a mask token in the data."""
    tokens = torch.randint(0, MASK, (ROWS, L))
    tokens[1, 4] = MASK
    is_target = torch.rand(ROWS, L) < 0.8
    is_target[0], is_target[3], is_target[5, :6] = True, False, False
    documents = (torch.rand(ROWS, L) < 0.2).cumsum(1)
    documents[0] = 0
    return CleanBatch(tokens, is_target, documents)


def alignments(name: str) -> Sequence[str]:
    return ("shifted",) if name == "next-token" else ("same_position", "shifted")


CASES = [
    pytest.param(name, alignment, id=f"{name}-{alignment}") for name in OBJECTIVES for alignment in alignments(name)
]


def assert_same(one: tuple[Tensor, list[Tensor]], other: tuple[Tensor, list[Tensor]]) -> None:
    torch.testing.assert_close(one[0], other[0], rtol=1e-12, atol=0.0)
    for ours, theirs in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-13)


class FixedRows:
    """A reader of the same rows in each epoch."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows

    def read(self, epoch: int, position: ReaderPosition, limit: int) -> tuple[list[Row], ReaderPosition]:
        return self.rows, None


def chat_rows() -> list[Row]:
    rows = []
    for number, segments in enumerate(CHAT_SEGMENTS):
        targets = [flag for before, answer in segments for flag in [False] * before + [True] * answer]
        ids = [index for index, sizes in enumerate(segments) for _ in range(sum(sizes))]
        padding = L - len(targets)
        rows.append(
            Row(
                np.random.default_rng(number).integers(0, MASK, L).astype(np.int32),
                np.array([0] * len(ids) + [-1] * padding, dtype=np.int32),
                np.array(targets + [False] * padding),
                np.array(ids + [-1] * padding, dtype=np.int32),
                np.array([position == len(targets) - 1 and targets[-1] for position in range(L)]),
            )
        )
    return rows


def assert_partition_is_not_seen(model: Transformer, config: ObjectiveConfig, rows: list[Row]) -> None:
    """One batch of all rows, halves, and single rows, on one, two and four ranks."""
    objective = build_objective(config, model.config)

    def load(micro_batch_size: int, world_size: int) -> list[NoisedBatch]:
        loaders = [
            Loader(FixedRows(rows), objective, len(rows), micro_batch_size, 3, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        return [draw for loader in loaders for draw in loader.next_step(5).noised_batches]

    def sums(draws: list[NoisedBatch]) -> list[float]:
        return [
            sum(getattr(draw, name) for draw in draws)
            for name in ("num_targets", "denominator", "eos_padding_denominator")
        ]

    whole = load(len(rows), 1)
    expected = loss_and_gradient(model, objective, whole)
    assert sums(whole)[1] > 0 and any(g.abs().max() > 1e-3 for g in expected[1])
    for micro_batch_size, world_size in ((len(rows) // 2, 1), (1, 1), (len(rows) // 2, 2), (1, 2), (1, 4)):
        parts = load(micro_batch_size, world_size)
        assert len(parts) >= len(rows) // micro_batch_size
        assert sums(parts) == pytest.approx(sums(whole), rel=1e-14)
        assert_same(loss_and_gradient(model, objective, parts), expected)


@pytest.mark.parametrize(("name", "alignment"), CASES)
def test_parts_make_the_whole(models: dict[str, Transformer], batch: CleanBatch, name: str, alignment: str) -> None:
    assert batch.document_BL is not None
    columns = (batch.tokens_BL.int().numpy(), batch.document_BL.int().numpy(), batch.loss_mask_BL.numpy())
    rows = [Row(*values) for values in zip(*columns, strict=True)]
    assert_partition_is_not_seen(models[alignment], OBJECTIVES[name], rows)


@pytest.mark.parametrize("name", CHAT_OBJECTIVES)
def test_parts_of_conversations_make_the_whole(models: dict[str, Transformer], name: str) -> None:
    """Answers of 0 to 7 tokens: some micro-batches have no target."""
    model = models["token-causal" if name.startswith("one forward") else "same_position"]
    assert_partition_is_not_seen(model, CHAT_OBJECTIVES[name], chat_rows())


@pytest.mark.parametrize(("name", "alignment"), CASES)
def test_padding_adds_nothing(models: dict[str, Transformer], batch: CleanBatch, name: str, alignment: str) -> None:
    """Tokens behind the row that are no targets, each a document of its own or all of them one; and rows of padding.

    A whole number of blocks or not, whatever tokens they are.
    """
    model = models[alignment]
    objective = build_objective(OBJECTIVES[name], model.config)
    key = NoiseKey(first_sequence=0, **{**KEY, "num_sequences_in_step": ROWS + 2})
    expected = loss_and_gradient(model, objective, [objective.build_noised_batch(batch, key)])
    assert batch.document_BL is not None
    for length, numbers in ((3, [-1, -1, -1]), (5, [100, 101, 102, 103, 104])):
        tokens, is_target = torch.randint(0, MASK + 1, (ROWS + 2, L + length)), torch.zeros(ROWS + 2, L + length) > 0
        documents = torch.tensor([*([0] * L), *numbers]).repeat(ROWS + 2, 1)
        tokens[:ROWS, :L], is_target[:ROWS, :L] = batch.tokens_BL, batch.loss_mask_BL
        documents[:ROWS, :L] = batch.document_BL
        padded = objective.build_noised_batch(CleanBatch(tokens, is_target, documents), key)
        assert_same(loss_and_gradient(model, objective, [padded]), expected)


@pytest.mark.parametrize(("name", "alignment"), CASES)
def test_only_targets_are_noised_and_scored(
    models: dict[str, Transformer], batch: CleanBatch, name: str, alignment: str
) -> None:
    objective = build_objective(OBJECTIVES[name], models[alignment].config)
    is_target = batch.loss_mask_BL & (batch.tokens_BL != MASK)
    is_scored = torch.zeros_like(is_target)
    for number in range(12):
        draw = objective.build_noised_batch(
            batch, NoiseKey(seed=number, step=5, first_sequence=0, num_sequences_in_step=ROWS)
        )
        copies = len(draw.inputs_BS) // ROWS
        noised = draw.inputs_BS[:, :L] != batch.tokens_BL.repeat(copies, 1)
        assert not (noised & ~is_target.repeat(copies, 1)).any()
        assert (draw.positions_N.diff() > 0).all() and (draw.weights_N > 0).all()
        places = target_positions(draw, models[alignment].config.logit_alignment)
        scored = torch.zeros(copies * ROWS * L, dtype=torch.bool)
        scored[places] = True
        torch.testing.assert_close(draw.targets_N, batch.tokens_BL.repeat(copies, 1).flatten()[places])
        if not isinstance(draw.pattern, Causal):
            torch.testing.assert_close(scored.view(-1, L), noised)
        is_scored |= scored.view(copies, ROWS, L).any(0)
    maskable = is_target.clone()
    if alignment == "shifted":
        assert batch.document_BL is not None
        maskable[:, 0] = False
        maskable[:, 1:] &= batch.document_BL[:, 1:] == batch.document_BL[:, :-1]
    torch.testing.assert_close(is_scored, maskable)
