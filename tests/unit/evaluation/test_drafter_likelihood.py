"""Likelihoods with an adapter of masked positions: next tokens are the base's, bounds the adapter's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from config.evaluation.likelihood import AnswerLikelihoodConfig
from diffusionlm.diffusion.layout import InputLayout
from diffusionlm.diffusion.noised_batch import CleanBatch
from diffusionlm.evaluation.draft_acceptance import measure_draft_acceptance
from diffusionlm.evaluation.likelihood.scoring import OptionsRequest, score_documents
from diffusionlm.evaluation.nelbo import nelbo
from diffusionlm.models.transformer import Transformer
from tests.conftest import MakeModel
from tests.masked_adapters import HookedAdapter, add_drafter

MASK, L = 18, 9
TOKENS = torch.randint(0, MASK, (3, L), generator=torch.Generator().manual_seed(4))
IS_TARGET = (torch.arange(L) >= 3).expand(3, L)
NEMOTRON: dict[str, Any] = {"clean_alignment": "shifted", "block_length": 4}
I_DLM: dict[str, Any] = {**NEMOTRON, "logit_alignment": "shifted", "noisy_attention": "token"}


@pytest.fixture(params=[NEMOTRON, I_DLM], ids=["Nemotron", "I-DLM"])
def models(request: pytest.FixtureRequest, tiny_model: MakeModel) -> tuple[Transformer, Transformer, Transformer]:
    """The base, the model with the adapter, and the base with a second implementation of it."""
    base, adapted, hooked = (tiny_model(torch.float64, scale=1.0, **request.param) for _ in range(3))
    HookedAdapter(hooked, add_drafter(adapted), lambda tokens: tokens == MASK)
    return base, adapted, hooked


def test_next_tokens_have_the_bits_of_the_base(models: tuple[Transformer, ...]) -> None:
    base, adapted, _ = models
    layout = InputLayout.from_config(base.config, 4).next_token
    noised = layout.build_noised_batch(CleanBatch(TOKENS, IS_TARGET), IS_TARGET.numpy(), IS_TARGET.double().numpy())
    logits = [
        model(noised.inputs_BS, pattern=noised.pattern, masked_BL=noised.masked_BS).detach()
        for model in (base, adapted)
    ]
    assert torch.equal(*logits)
    request = OptionsRequest((2, 0, MASK, 1), ((4, 1, 3), (5, 17, 6)))
    ours, expected = (score_documents(model, [request], None) for model in (adapted, base))
    assert [answer.log_likelihoods for answer in ours] == [answer.log_likelihoods for answer in expected]


def test_bounds_are_those_of_masked_rows(models: tuple[Transformer, ...]) -> None:
    bounds = [nelbo(model, TOKENS, IS_TARGET, block_length=4, num_mc_samples=15).nats_per_token for model in models]
    assert bounds[1] == pytest.approx(bounds[2], abs=1e-9) and bounds[1] != pytest.approx(bounds[0], abs=1e-3)


def test_drafts_are_those_of_masked_rows(models: tuple[Transformer, ...]) -> None:
    layout = InputLayout.from_config(models[0].config, 4)
    base, ours, expected = (
        measure_draft_acceptance(model.requires_grad_(requires_grad=False), layout, CleanBatch(TOKENS, IS_TARGET), 2)
        for model in models
    )
    for own, other, plain in zip(ours, expected, base, strict=True):
        assert own == pytest.approx(other, abs=1e-9) and own[0] != pytest.approx(plain[0], abs=1e-3)


def test_answers_have_the_bound_of_texts(tiny_model: MakeModel) -> None:
    """By copies of blocks after one clean text, and by two halves."""
    model = add_drafter(tiny_model(torch.float64, **NEMOTRON))
    text = tuple(TOKENS[0].tolist())
    config = AnswerLikelihoodConfig(block_length=4, num_mc_samples=15)
    [answer] = score_documents(model, [OptionsRequest(text[:3], (text[3:],))], config)
    bound = nelbo(model, TOKENS[:1], IS_TARGET[:1], block_length=4, num_mc_samples=15)
    assert answer.is_exact and -answer.log_likelihood == pytest.approx(6 * bound.nats_per_token, abs=1e-9)
