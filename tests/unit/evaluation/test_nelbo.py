"""Likelihood of tiny models against enumeration and plain loops, in fp64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from diffusionlm.evaluation.likelihood.scoring import conditional_likelihood
from diffusionlm.evaluation.nelbo import nelbo
from diffusionlm.models.patterns import BlockCausal, Causal
from diffusionlm.models.transformer import Transformer
from tests.unit.evaluation.conftest import MASK

TOKENS = torch.tensor([[0, 2, 1, 4, 3, 1, 0], [3, 3, 0, 2, 4, 4, 1], [1, 0, 2, 2, 3, 0, 4]])
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 1], [0] * 7, [0, 0, 1, 1, 1, 1, -1]])


def log_probabilities(logits_V: torch.Tensor, model: Transformer) -> torch.Tensor:
    if model.config.mask_token_id is not None:
        logits_V = logits_V.clone()
        logits_V[MASK] = -math.inf
    return logits_V.log_softmax(-1)


@torch.no_grad()
def left_to_right(model: Transformer, text: list[int]) -> list[float]:
    """Log-probability of each token after the clean ones before it, by a forward for each."""
    values = []
    is_shifted = model.config.logit_alignment == "shifted"
    for position, token in enumerate(text):
        if is_shifted:
            if position == 0:
                continue
            logits_V = model(torch.tensor([text[:position]]), pattern=Causal())[0, -1]
        else:
            logits_V = model(torch.tensor([[*text[:position], MASK]]), pattern=BlockCausal(1))[0, -1]
        values.append(float(log_probabilities(logits_V, model)[token]))
    return values


@pytest.mark.parametrize("which", ["diffusion", "shifted", "autoregressive"])
def test_blocks_of_one_token_are_the_chain_rule_of_each_document(which: str, request: pytest.FixtureRequest) -> None:
    model: Transformer = request.getfixturevalue(which)
    report = nelbo(model, TOKENS, DOCUMENTS >= 0, block_length=1, num_mc_samples=3, document_BL=DOCUMENTS, batch_size=2)
    expected, num_tokens = [], 0
    for row, documents in zip(TOKENS.tolist(), DOCUMENTS.tolist(), strict=True):
        pieces = [[t for t, d in zip(row, documents, strict=True) if d == number] for number in (0, 1)]
        values = [value for piece in pieces for value in left_to_right(model, piece)]
        expected.append(-sum(values))
        num_tokens += len(values)
    assert report.row_nats == pytest.approx(expected, abs=1e-5)
    assert report.num_tokens == num_tokens and report.nats == pytest.approx(sum(report.row_nats))
    assert report.nats_per_token == pytest.approx(report.nats / report.num_tokens)


def test_masks_are_enumerated_where_they_are_fewer_than_the_samples(
    diffusion: Transformer, shifted: Transformer
) -> None:
    """In documents that end inside a block, and blocks with context; a row by `conditional_likelihood`."""
    for model in (diffusion, shifted):
        is_target = (DOCUMENTS >= 0) & (torch.arange(7) > 0)
        exact = nelbo(model, TOKENS, is_target, 3, 7, document_BL=DOCUMENTS, batch_size=2)
        assert exact == nelbo(model, TOKENS, is_target, 3, 900, seed=5, document_BL=DOCUMENTS, batch_size=2)
        samples = [nelbo(model, TOKENS, is_target, 3, 6, seed=seed, document_BL=DOCUMENTS).nats for seed in range(30)]
        assert abs(np.mean(samples) - exact.nats) < 4 * np.std(samples) / math.sqrt(30)
        answer = conditional_likelihood(model, TOKENS[1, :1].tolist(), TOKENS[1, 1:].tolist(), block_length=3)
        assert exact.row_nats[1] == pytest.approx(-answer.log_likelihood, abs=1e-5)


def test_arguments_are_checked(diffusion: Transformer, autoregressive: Transformer) -> None:
    for name in ("num_mc_samples", "block_length", "batch_size"):
        with pytest.raises(ValueError, match=f"{name} = 0 must be at least 1"):
            nelbo(diffusion, TOKENS, **{name: 0})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no target token"):
        nelbo(diffusion, TOKENS, torch.zeros_like(TOKENS, dtype=torch.bool))
    with pytest.raises(ValueError, match="no target token"):
        nelbo(autoregressive, TOKENS[:, :1], block_length=1)
    for block_length in (None, 2):
        with pytest.raises(ValueError, match="no mask token"):
            nelbo(autoregressive, TOKENS, block_length=block_length)


def test_curve_of_block_diffusion_is_by_share_of_the_block(diffusion: Transformer) -> None:
    """Blocks of two tokens: one or both are masked, half or all of it; the last block has one."""
    report = nelbo(diffusion, TOKENS, block_length=2, num_mc_samples=2)
    assert [(low, high) for low, high, _ in report.by_masked_fraction] == [(0.4, 0.5), (0.9, 1.0)]
