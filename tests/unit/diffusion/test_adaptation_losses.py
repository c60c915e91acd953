"""From an autoregressive model to diffusion: CART weights, annealed attention and the auxiliary next-token loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from config.training.objective import (
    AllMasked,
    BlockDiffusionConfig,
    FixedCountMasking,
    IndependentMasking,
    MaskedDiffusionConfig,
    NextTokenConfig,
    ObjectiveConfig,
)
from diffusionlm.diffusion.corruption import CART_P, context_adaptive_weights
from diffusionlm.diffusion.layout import anneal_attention
from diffusionlm.diffusion.noised_batch import CleanBatch, NoisedBatch, NoiseKey
from diffusionlm.diffusion.objectives import build_objective, find_nelbo_deviation
from diffusionlm.models.patterns import AttentionPattern, Bidirectional, Causal, DenseBias
from diffusionlm.models.transformer import Transformer
from diffusionlm.training.metrics import sum_loss_parts
from tests.conftest import MakeModel
from tests.unit.diffusion.noise_cases import LENGTH, batch_of

# ----------------------------------------------------------------------------------------------------------------------
# CART


@pytest.mark.parametrize("p", [0.1, 0.3, 0.8, 1.0])
def test_cart_weights_equal_a_matrix_product(p: float) -> None:
    """The published form: a matrix of symmetric geometric weights times the visible tokens, for each document."""
    batch = batch_of(12)
    assert batch.document_BL is not None
    masked = batch.loss_mask_BL.numpy() & (np.random.default_rng(0).random((12, LENGTH)) < 0.5)
    distance = np.abs(np.arange(LENGTH)[:, None] - np.arange(LENGTH))
    matrix = np.where(distance > 0, 0.5 * p * (1.0 - p) ** np.maximum(distance - 1, 0), 0.0)
    documents = batch.document_BL.numpy()
    expected = np.zeros((12, LENGTH))
    for row in range(12):
        visible = ~masked[row] & (documents[row] >= 0)
        same = documents[row][:, None] == documents[row]
        expected[row] = np.where(masked[row], (matrix * same) @ visible, 0.0)
    np.testing.assert_allclose(context_adaptive_weights(batch, masked, p), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("complementary", [False, True])
def test_loss_with_cart_weights(tiny_model: MakeModel, complementary: bool) -> None:
    model = tiny_model(torch.float64)
    estimator = FixedCountMasking(weight="cart", complementary=complementary)
    config = MaskedDiffusionConfig(estimator=estimator)
    batch = CleanBatch(torch.arange(40).view(4, 10) % 18, torch.ones(4, 10, dtype=torch.bool))
    draw = build_objective(config, model.config).build_noised_batch(batch, NoiseKey(0, 0, 0, 4))
    copies = 2 if complementary else 1
    masked = (draw.inputs_BS != batch.tokens_BL.repeat(copies, 1)).numpy()
    expected = context_adaptive_weights(batch.repeat(copies), masked, CART_P)[masked] / copies
    np.testing.assert_allclose(draw.weights_N.numpy(), expected)
    assert draw.denominator == 40 and "context" in str(find_nelbo_deviation(config))


# ----------------------------------------------------------------------------------------------------------------------
# Annealing


def visible(pattern: AttentionPattern, length: int = 64) -> torch.Tensor:
    return pattern.dense_mask(length)[0].bool()


def test_attention_opens_with_the_steps() -> None:
    later = torch.ones(64, 64, dtype=torch.bool).triu(1)
    for step, probability in ((0, 0.1), (4, 0.5), (8, 0.9)):
        mask = visible(anneal_attention(Bidirectional(), 64, NoiseKey(3, step, 0, 8), 10))
        assert mask[~later].all()
        assert float(mask[later].float().mean()) == pytest.approx(probability, abs=0.05)
    for step, num_steps in ((9, 10), (500, 10), (0, 0), (7, 0)):
        assert anneal_attention(Bidirectional(), 64, NoiseKey(3, step, 0, 8), num_steps) == Bidirectional()


def test_annealed_attention_is_that_of_the_step() -> None:
    """Not of the micro-batch or the rank; another step and another seed have other pairs."""
    first = visible(anneal_attention(Bidirectional(), 64, NoiseKey(3, 2, 0, 8), 10))
    assert torch.equal(visible(anneal_attention(Bidirectional(), 64, NoiseKey(3, 2, 5, 8), 10)), first)
    for key in (NoiseKey(3, 3, 0, 8), NoiseKey(4, 2, 0, 8)):
        assert not torch.equal(visible(anneal_attention(Bidirectional(), 64, key, 10)), first)


def test_annealed_attention_stays_in_the_document(tiny_model: MakeModel) -> None:
    """At its start it is the causal attention of the autoregressive model."""
    model = tiny_model(torch.float64, logit_alignment="shifted")
    config = MaskedDiffusionConfig(anneal_attention_steps=10**12)
    documents = torch.tensor([[0] * 4 + [1] * 6])
    tokens = torch.arange(10)[None]
    batch = CleanBatch(tokens, tokens >= 0, documents)
    draw = build_objective(config, model.config).build_noised_batch(batch, NoiseKey(0, 0, 0, 1))
    assert isinstance(draw.pattern, DenseBias)
    assert torch.equal(draw.pattern.dense_mask(10).bool(), Causal(documents).dense_mask(10))
    logits, expected = model(draw.inputs_BS, pattern=draw.pattern), model(draw.inputs_BS, pattern=Causal(documents))
    torch.testing.assert_close(logits, expected, rtol=0.0, atol=1e-12)
    assert "annealed" in str(find_nelbo_deviation(config))


# ----------------------------------------------------------------------------------------------------------------------
# Auxiliary next-token loss


def loss_of(model: Transformer, objective: Any, draw: NoisedBatch, denominator: float) -> torch.Tensor:
    output = model(
        draw.inputs_BS,
        pattern=draw.pattern,
        output_positions=draw.positions_N,
        loss_inputs=objective.build_loss_inputs(draw, denominator),
    )
    return output.loss_sum


AUXILIARY: list[ObjectiveConfig] = [
    BlockDiffusionConfig(block_length=3, next_token_weight=0.3),
    BlockDiffusionConfig(block_length=(2, 4), next_token_weight=0.3, estimator=IndependentMasking()),
    MaskedDiffusionConfig(next_token_weight=0.3),
]


@torch.no_grad()
@pytest.mark.parametrize("alignment", ["same_position", "shifted"])
@pytest.mark.parametrize("config", AUXILIARY)
def test_auxiliary_loss_is_the_next_token_loss(tiny_model: MakeModel, config: Any, alignment: str) -> None:
    """Of the same targets, from a causal forward of the clean tokens; per target token of the step."""
    model = tiny_model(torch.float64, vocab_size=51, mask_token_id=50, logit_alignment=alignment)
    batch, key = batch_of(6), NoiseKey(0, 3, 0, 6)
    objective = build_objective(config, model.config)
    draw, auxiliary = objective.build_noised_batch(batch, key), objective.build_auxiliary_batch(batch)
    assert auxiliary is not None and auxiliary.is_auxiliary and isinstance(auxiliary.pattern, Causal)
    assert auxiliary.denominator == auxiliary.num_targets == 0
    assert torch.equal(auxiliary.inputs_BS, batch.tokens_BL)
    shifted = model.config.model_copy(update={"logit_alignment": "shifted"})
    next_token = build_objective(NextTokenConfig(), shifted)
    expected = 0.3 * loss_of(model, next_token, next_token.build_noised_batch(batch, key), draw.denominator)
    torch.testing.assert_close(loss_of(model, objective, auxiliary, draw.denominator), expected)
    parts = sum_loss_parts(auxiliary, torch.full((len(auxiliary.positions_N),), 2.0))
    assert parts[0, 2] / parts[1, 2] == pytest.approx(2.0)
    assert "next-token" in str(find_nelbo_deviation(config))


def test_auxiliary_loss_per_answer(tiny_model: MakeModel) -> None:
    """Two answers of 2 and 6 tokens weigh the same."""
    model = tiny_model(torch.float64)
    targets = torch.tensor([[False] * 2 + [True] * 2 + [False] * 4, [False] * 2 + [True] * 6])
    batch = CleanBatch(torch.zeros(2, 8, dtype=torch.int64), targets)
    config = BlockDiffusionConfig(block_length=4, normalizer="rows", next_token_weight=0.5)
    auxiliary = build_objective(config, model.config).build_auxiliary_batch(batch)
    assert auxiliary is not None
    assert auxiliary.weights_N.tolist() == pytest.approx([0.5 / 2] * 2 + [0.5 / 6] * 6)


def test_objectives_without_a_weight_have_no_second_forward(tiny_model: MakeModel) -> None:
    batch = batch_of(2)
    model = tiny_model(logit_alignment="shifted").config
    configs: list[ObjectiveConfig] = [MaskedDiffusionConfig(), BlockDiffusionConfig(block_length=2), NextTokenConfig()]
    assert [build_objective(config, model).build_auxiliary_batch(batch) for config in configs] == [None] * 3


def test_config_errors_name_the_remedy() -> None:
    with pytest.raises(ValidationError, match=r'"cart" needs kind = "masked_diffusion"'):
        BlockDiffusionConfig(block_length=4, estimator=FixedCountMasking(weight="cart"))
    with pytest.raises(ValidationError, match=r'"all_masked" leaves nothing to read.*"block_diffusion"'):
        MaskedDiffusionConfig(estimator=AllMasked())
    with pytest.raises(ValidationError, match="balance = true weighs the next-token loss of one forward"):
        BlockDiffusionConfig(block_length=4, next_token_weight=1.0, balance=True)
    with pytest.raises(ValidationError, match=r'clean_attention = "token" is of the clean half'):
        BlockDiffusionConfig(block_length=4, clean_attention="token", attention="prompt_and_own_block")
