"""A wrong mask shows: a model that is trained with it falls below the entropy of its source, which no right one can.

Independent uniform tokens leave nothing to be learnt, so that whatever is gained was seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from config.training.objective import BlockDiffusionConfig
from diffusionlm.diffusion import layout
from diffusionlm.diffusion.noised_batch import CleanBatch, NoiseKey
from diffusionlm.diffusion.objectives import build_objective
from diffusionlm.evaluation.nelbo import NelboReport, nelbo
from diffusionlm.models.patterns import BlockDiffusion
from diffusionlm.models.transformer import Transformer

MakeModel = Callable[..., Transformer]

V, L, BLOCK = 4, 8, 4


class OwnCleanBlock(BlockDiffusion):
    """>= in place of >: a noisy block sees its own clean tokens."""

    def dense_mask(self, length: int, device: torch.device | str = "cpu", window: int | None = None) -> Tensor:
        block = torch.arange(length // 2, device=device) // self.block_length
        mask = super().dense_mask(length, device, window)
        mask[:, : length // 2, length // 2 :] |= block[:, None] >= block
        return mask

    def intervals(self, length: int, device: torch.device | str = "cpu", window: int | None = None) -> Any:
        return None


class CleanSeesLater(OwnCleanBlock):
    """The clean stream sees all of itself: what a noisy block reads of earlier blocks knows of later ones."""

    def dense_mask(self, length: int, device: torch.device | str = "cpu", window: int | None = None) -> Tensor:
        mask = BlockDiffusion.dense_mask(self, length, device, window)
        mask[:, length // 2 :, length // 2 :] = True
        return mask


def uniform_rows(rows: int, seed: int) -> Tensor:
    return torch.randint(0, V, (rows, L), generator=torch.Generator().manual_seed(seed))


def trained(tiny_model: MakeModel, steps: int, block_length: int, alignment: str = "same_position") -> Transformer:
    vocabulary = {"vocab_size": V + 1, "mask_token_id": V, "eos_token_id": 0, "pad_token_id": 0}
    model = tiny_model(scale=0.05, logit_alignment=alignment, **vocabulary)
    objective = build_objective(BlockDiffusionConfig(block_length=block_length), model.config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(steps):
        tokens = uniform_rows(64, step)
        draw = objective.build_noised_batch(CleanBatch(tokens, tokens >= 0), NoiseKey(0, step, 0, len(tokens)))
        loss_inputs = objective.build_loss_inputs(draw, draw.denominator)
        model(
            draw.inputs_BS, pattern=draw.pattern, output_positions=draw.positions_N, loss_inputs=loss_inputs
        ).loss_sum.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def evaluated(model: Transformer, block_length: int) -> NelboReport:
    return nelbo(model, uniform_rows(512, 10**6), block_length=block_length, num_mc_samples=2)


@pytest.mark.slow
@pytest.mark.parametrize("alignment", ["same_position", "shifted"])
def test_right_mask_stays_above_the_entropy(tiny_model: MakeModel, alignment: str) -> None:
    report = evaluated(trained(tiny_model, 100, BLOCK, alignment), BLOCK)
    entropy, error = math.log(V), 3 * report.standard_error
    assert entropy - error <= report.nats_per_token <= 1.04 * entropy + error


@pytest.mark.parametrize(
    ("mutant", "block_length", "steps"),
    [(OwnCleanBlock, BLOCK, 100), (CleanSeesLater, 2, 200)],
)
@pytest.mark.slow
def test_wrong_mask_falls_below_the_entropy(
    tiny_model: MakeModel,
    monkeypatch: pytest.MonkeyPatch,
    mutant: type[BlockDiffusion],
    block_length: int,
    steps: int,
) -> None:
    """And the same weights, judged with the right mask, do not."""
    with monkeypatch.context() as patch:
        patch.setattr(layout, "BlockDiffusion", mutant)
        model = trained(tiny_model, steps, block_length)
        leaking = evaluated(model, block_length)
    entropy = math.log(V)
    assert leaking.nats_per_token < min(0.8 * entropy, entropy - 10 * leaking.standard_error)
    honest = evaluated(model, block_length)
    assert honest.nats_per_token > entropy - 3 * honest.standard_error
