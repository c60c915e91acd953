"""Likelihood of tiny models against enumeration and plain loops, in fp64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from config.evaluation.likelihood import AnswerLikelihoodConfig
from diffusionlm.evaluation.likelihood.scoring import OptionsRequest, conditional_likelihood, score_documents
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
def test_blocks_of_one_token_are_exact(which: str, request: pytest.FixtureRequest) -> None:
    model: Transformer = request.getfixturevalue(which)
    for seed, draws in ((0, 1), (1, 3)):
        report = nelbo(model, TOKENS, block_length=1, num_mc_samples=draws, seed=seed)
        expected = [left_to_right(model, row) for row in TOKENS.tolist()]
        assert report.row_nats == pytest.approx([-sum(row) for row in expected], abs=1e-5)
        assert report.num_tokens == sum(map(len, expected))
        assert report.nats == pytest.approx(sum(report.row_nats))
        assert report.nats_per_token == pytest.approx(report.nats / report.num_tokens)


@pytest.mark.parametrize("which", ["diffusion", "shifted", "autoregressive"])
def test_documents_of_a_row_are_texts_of_their_own(which: str, request: pytest.FixtureRequest) -> None:
    model: Transformer = request.getfixturevalue(which)
    is_target = DOCUMENTS >= 0
    report = nelbo(model, TOKENS, is_target, block_length=1, document_BL=DOCUMENTS, batch_size=2)
    expected = []
    for row, documents in zip(TOKENS.tolist(), DOCUMENTS.tolist(), strict=True):
        pieces = [[t for t, d in zip(row, documents, strict=True) if d == number] for number in (0, 1)]
        expected.append(-sum(value for piece in pieces for value in left_to_right(model, piece)))
    assert report.row_nats == pytest.approx(expected, abs=1e-5)


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


def test_rows_and_a_single_row(diffusion: Transformer) -> None:
    is_target = torch.ones_like(TOKENS, dtype=torch.bool)
    is_target[1] = False
    report = nelbo(diffusion, TOKENS, is_target, block_length=3)
    assert report.row_nats[1] == 0.0 and report.num_tokens == 14
    assert nelbo(diffusion, TOKENS[:1]).standard_error == math.inf


def test_curve_of_block_diffusion_is_by_share_of_the_block(diffusion: Transformer) -> None:
    """Blocks of two tokens: one or both are masked, half or all of it; the last block has one."""
    report = nelbo(diffusion, TOKENS, block_length=2, num_mc_samples=2)
    assert [(low, high) for low, high, _ in report.by_masked_fraction] == [(0.4, 0.5), (0.9, 1.0)]


# ----------------------------------------------------------------------------------------------------------------------
# An answer after its prompt

PROMPT = [2, 0, 1]


def test_the_likelihood_of_an_answer_is_that_of_a_document(diffusion: Transformer) -> None:
    config = AnswerLikelihoodConfig(bidirectional=True, num_mc_samples=24, seed=3)
    [expected] = score_documents(diffusion, [OptionsRequest(tuple(PROMPT), ((4, 3, 1, 0, 2),))], config)
    estimate = conditional_likelihood(diffusion, PROMPT, [4, 3, 1, 0, 2], num_mc_samples=24, seed=3)
    assert not expected.is_exact and estimate.num_tokens == 5
    assert estimate.log_likelihood == pytest.approx(expected.log_likelihood, abs=1e-9)
    assert estimate.standard_error == pytest.approx(expected.standard_error, abs=1e-9)
    in_blocks = conditional_likelihood(diffusion, PROMPT, [4, 3, 3, 1], block_length=1)
    assert in_blocks.log_likelihood == pytest.approx(
        sum(left_to_right(diffusion, [*PROMPT, 4, 3, 3, 1])[-4:]), abs=1e-5
    )
