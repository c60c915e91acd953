"""Noise on the input embeddings of training: on the mask token (LLaDA2), and on all (NEFTune) by its formula."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from config.train import TrainConfig
from diffusionlm.diffusion.noised_batch import NoisedBatch
from diffusionlm.diffusion.rng import RngStream, keyed_rng
from diffusionlm.models.patterns import AttentionPattern, Bidirectional, BlockDiffusion
from diffusionlm.models.transformer import Transformer
from diffusionlm.training.setup import MASK_NOISE_STD, build_perturbations
from tests.conftest import MakeModel
from tests.tiny_run import change_config

MASK, ALPHA, STEP, FIRST_ROW = 18, 5.0, 3, 4
NEFTUNE: dict[str, Any] = {"training": {"neftune_alpha": ALPHA}}
MASK_NOISE: dict[str, Any] = {"objective": {"kind": "masked_diffusion", "mask_noise_steps": STEP + 1}}
DOCUMENTS_BL = torch.tensor([[0] * 3 + [1] * 5 + [-1] * 2, [0] * 9 + [1]])
LENGTHS = [[3] * 3 + [5] * 5 + [0] * 2, [9] * 9 + [1]]
"""Of each token's conversation in two packed rows; padding has none."""


def make_batch(inputs_BS: torch.Tensor, pattern: AttentionPattern) -> NoisedBatch:
    nothing = torch.zeros(0)
    return NoisedBatch(inputs_BS, pattern, nothing, nothing, nothing, first_row=FIRST_ROW)


def measure_noise(
    config: TrainConfig, model: Transformer, batch: NoisedBatch, changes: dict[str, Any], step: int = STEP
) -> torch.Tensor:
    """What the context of a training forward adds to the embeddings, [B, S, D]."""
    [perturb] = build_perturbations(change_config(config, **changes), model)
    embed = model.model.embed_tokens
    clean = embed(batch.inputs_BS)
    with perturb(step, batch):
        noisy = embed(batch.inputs_BS)
    assert torch.equal(embed(batch.inputs_BS), clean), "no noise after the step"
    return (noisy - clean).detach()


def test_noise_is_at_mask_tokens_of_the_noisy_half(config: TrainConfig, tiny_model: MakeModel) -> None:
    model = tiny_model(torch.float64)
    tokens = torch.tensor([[1, MASK, 2, MASK, 1, MASK, 2, 3], [MASK] * 8])
    batch = make_batch(tokens, BlockDiffusion(2))
    noise = measure_noise(config, model, batch, MASK_NOISE)
    is_noisy = (noise != 0).any(-1)
    assert is_noisy.tolist() == [[False, True, False, True] + [False] * 4, [True] * 4 + [False] * 4]
    alone = replace(batch, inputs_BS=tokens[1:], first_row=FIRST_ROW + 1)
    assert torch.equal(measure_noise(config, model, alone, MASK_NOISE)[0], noise[1]), "it is that of the row"
    assert not torch.equal(noise[0, 1], noise[0, 3]) and not torch.equal(noise[0, 1], noise[1, 1])
    assert not measure_noise(config, model, batch, MASK_NOISE, step=STEP + 1).any()
    assert not measure_noise(config, model, replace(batch, is_auxiliary=True), MASK_NOISE).any()


def test_distribution_of_the_noise_on_the_mask(config: TrainConfig, tiny_model: MakeModel) -> None:
    noise = measure_noise(config, tiny_model(), make_batch(torch.full((8, 200), MASK), Bidirectional()), MASK_NOISE)
    noise /= MASK_NOISE_STD
    assert abs(noise.std().item() - 1) < 0.04 and abs(noise.mean().item()) < 0.04


def test_neftune_is_its_formula(config: TrainConfig, tiny_model: MakeModel) -> None:
    """For each token of a conversation alpha / sqrt(L D) times a number from -1 to 1, whichever forward it is in."""
    model = tiny_model(torch.float64)
    D, inputs_BS = model.config.hidden_size, torch.arange(40).reshape(2, 20) % 15
    batch = make_batch(inputs_BS, BlockDiffusion(2, DOCUMENTS_BL))
    noise = measure_noise(config, model, batch, NEFTUNE)
    for row, lengths in enumerate(LENGTHS):
        seed = keyed_rng(config.run.seed, RngStream.EMBEDDING_NOISE, STEP, FIRST_ROW + row).integers(2**62)
        uniform_LD = torch.rand((10, D), generator=torch.Generator().manual_seed(int(seed))).double() * 2 - 1
        for position, length in enumerate(lengths):
            expected = uniform_LD[position] * (ALPHA / math.sqrt(length * D) if length else 0.0)
            for half in (0, 10):
                torch.testing.assert_close(noise[row, half + position], expected, rtol=1e-6, atol=1e-7)
    pattern = BlockDiffusion(2, DOCUMENTS_BL[1:])
    alone = replace(batch, inputs_BS=inputs_BS[1:], pattern=pattern, first_row=FIRST_ROW + 1)
    assert torch.equal(measure_noise(config, model, alone, NEFTUNE)[0], noise[1]), "it is that of the row"


def test_distribution_of_neftune(config: TrainConfig, tiny_model: MakeModel) -> None:
    model, batch = tiny_model(), make_batch(torch.zeros(8, 400, dtype=torch.int64), Bidirectional())
    noise = measure_noise(config, model, batch, NEFTUNE) * math.sqrt(400 * model.config.hidden_size) / ALPHA
    assert 0.99 < noise.abs().max() <= 1.001
    assert abs(noise.mean().item()) < 0.02 and noise.var().item() == pytest.approx(1 / 3, rel=0.03)
