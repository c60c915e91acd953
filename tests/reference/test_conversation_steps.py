"""A step over conversations does not know how it was cut into ranks and micro-batches. fp64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from config.training.objective import (
    BlockDiffusionConfig,
    FixedCountMasking,
    IndependentMasking,
    MaskedDiffusionConfig,
    ObjectiveConfig,
)
from diffusionlm.data.loader import Loader
from diffusionlm.data.packing import Row
from diffusionlm.data.reader import ReaderPosition
from diffusionlm.diffusion.noised_batch import NoisedBatch
from diffusionlm.diffusion.objectives import build_objective
from diffusionlm.models.transformer import Transformer

MakeModel = Callable[..., Transformer]

MASK, L, ROWS = 18, 12, 4
SEGMENTS = [[(3, 2), (2, 4)], [(1, 1)], [(12, 0)], [(2, 5), (0, 3)]]
"""Of each row: (tokens of the prompt, of the answer) of each segment; the third has no target."""

OBJECTIVES: dict[str, ObjectiveConfig] = {
    "masked": MaskedDiffusionConfig(fill_weight=0.5),
    "per answer": MaskedDiffusionConfig(loss="guidelines", estimator=IndependentMasking(), fill_weight=0.5),
    "blocks": BlockDiffusionConfig(block_length=3, fill_weight=0.5),
    "next token, too": BlockDiffusionConfig(block_length=3, loss="guidelines", next_token_weight=0.3),
    "pairs": BlockDiffusionConfig(block_length=2, loss="guidelines", estimator=FixedCountMasking(complementary=True)),
}


class ConversationRows:
    """The same four rows in each epoch."""

    def read(self, epoch: int, position: ReaderPosition, limit: int) -> tuple[list[Row], ReaderPosition]:
        rows = []
        for number, segments in enumerate(SEGMENTS):
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
        return rows, None


def load(
    config: ObjectiveConfig, model: Transformer, micro_batch_size: int, world_size: int
) -> list[list[NoisedBatch]]:
    """The micro-batches of each rank."""
    objective = build_objective(config, model.config)
    loaders = [
        Loader(ConversationRows(), objective, ROWS, micro_batch_size, 7, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    return [loader.next_step(2) for loader in loaders]


def loss_and_gradient(config: ObjectiveConfig, model: Transformer, ranks: list[list[NoisedBatch]]) -> list[Tensor]:
    """Sums over all ranks, with the denominator of the whole step."""
    objective = build_objective(config, model.config)
    draws = [draw for rank in ranks for draw in rank]
    denominator = sum(draw.denominator for draw in draws)
    loss = torch.zeros((), dtype=torch.float64)
    for draw in draws:
        loss = (
            loss
            + model(
                draw.inputs_BS,
                pattern=draw.pattern,
                output_positions=draw.positions_N,
                loss_inputs=objective.build_loss_inputs(draw, denominator),
            ).loss_sum
        )
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_steps_do_not_depend_on_ranks_and_accumulation(tiny_model: MakeModel, name: str) -> None:
    """Answers of 0 to 9 tokens: of two ranks with micro-batches of one row, one has no target in a micro-batch."""
    config, model = OBJECTIVES[name], tiny_model(torch.float64)
    [forwards] = load(config, model, ROWS, 1)
    whole = forwards[0]
    expected = loss_and_gradient(config, model, [forwards])
    assert expected[0] > 0
    for micro_batch_size, world_size in ((2, 1), (1, 1), (2, 2), (1, 2), (1, 4)):
        ranks = load(config, model, micro_batch_size, world_size)
        draws = [draw for rank in ranks for draw in rank]
        assert sum(draw.num_targets for draw in draws) == whole.num_targets == 15
        assert sum(draw.denominator for draw in draws) == pytest.approx(whole.denominator, rel=1e-14)
        assert sum(draw.fill_denominator for draw in draws) == pytest.approx(whole.fill_denominator, rel=1e-14)
        for ours, theirs in zip(loss_and_gradient(config, model, ranks), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-13)
