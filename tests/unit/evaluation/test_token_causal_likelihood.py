"""Likelihoods of a model of token-causal text: exact by its next-token outputs, and the bound of its blocks."""

from __future__ import annotations

import pytest
import torch

from config.evaluation.likelihood import AnswerLikelihoodConfig, NelboConfig
from diffusionlm.diffusion.noised_batch import CleanBatch
from diffusionlm.evaluation.likelihood.scoring import OptionsRequest, score_documents
from diffusionlm.evaluation.nelbo import NelboEstimator, nelbo
from diffusionlm.evaluation.text_likelihood import resolve_method
from diffusionlm.models.patterns import Causal
from tests.conftest import MakeModel
from tests.unit.evaluation.conftest import MASK, VOCAB, build

CONTEXT, ANSWER = (2, 0, 1), (4, 1, 3, 0, 2, 2)
TEXT = torch.tensor([[*CONTEXT, *ANSWER]])
IS_ANSWER = torch.arange(9)[None] >= 3


@torch.no_grad()
def test_answers_and_texts(tiny_model: MakeModel) -> None:
    model = build(tiny_model, clean_alignment="shifted", block_length=4)
    logits = model(TEXT, pattern=Causal())[0]
    logits[:, MASK] = -torch.inf
    expected = float(logits.log_softmax(-1)[torch.arange(2, 8), TEXT[0, 3:]].sum())
    request = OptionsRequest(CONTEXT, (ANSWER,))
    (exact,) = score_documents(model, [request], None)
    assert exact.log_likelihood == pytest.approx(expected, abs=1e-9) and exact.is_exact and exact.num_forwards == 1
    layout, method = resolve_method(NelboConfig(next_token=True), model.config)
    estimator = NelboEstimator(layout, CleanBatch(TEXT, IS_ANSWER), 4, 0, 8)
    report = estimator.build_report([estimator.run_forward(model, index) for index in range(estimator.num_forwards)])
    assert (method, estimator.num_forwards) == ("exact, next token", 1)
    assert -6 * report.nats_per_token == pytest.approx(expected, abs=1e-9)


def test_the_bound_of_blocks_reads_causal_text(tiny_model: MakeModel) -> None:
    """By copies of blocks after one clean text, and by two halves; block-causal text has another bound."""
    values = []
    for alignment in ("shifted", None):
        options = {"vocab_size": VOCAB, "mask_token_id": MASK, "eos_token_id": 0, "pad_token_id": 0, "scale": 0.5}
        model = tiny_model(torch.float64, clean_alignment=alignment, **options)
        config = AnswerLikelihoodConfig(block_length=4, num_mc_samples=15)
        (answer,) = score_documents(model, [OptionsRequest(CONTEXT, (ANSWER,))], config)
        bound = nelbo(model, TEXT, IS_ANSWER, block_length=4, num_mc_samples=15)
        assert answer.is_exact and -answer.log_likelihood == pytest.approx(6 * bound.nats_per_token, abs=1e-9)
        values.append(bound.nats_per_token)
    assert values[0] != pytest.approx(values[1], abs=1e-6)


def test_what_has_no_likelihood_is_refused(tiny_model: MakeModel) -> None:
    config = build(tiny_model).config
    with pytest.raises(ValueError, match=r"next_token = true needs outputs.*clean_alignment"):
        resolve_method(NelboConfig(next_token=True), config)
    with pytest.raises(ValueError, match="next_token = true is causal"):
        NelboConfig(next_token=True, block_length=4)
    model = build(tiny_model, logit_alignment="shifted", clean_alignment="shifted", noisy_attention="token")
    with pytest.raises(ValueError, match="block_length = 4: with these outputs"):
        score_documents(model, [OptionsRequest(CONTEXT, (ANSWER,))], AnswerLikelihoodConfig(block_length=4))
