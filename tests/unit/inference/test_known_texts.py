"""Log-probabilities of a text that is decoded from left to right: those of forwards by hand, and exact likelihoods."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from config.generation import GenerationConfig
from diffusionlm.evaluation.nelbo import nelbo
from diffusionlm.evaluation.sampler_likelihood import sampler_likelihood
from diffusionlm.inference.generate import Generation
from diffusionlm.inference.request_builder import SCORED_TOKENS, prepare_prompt_scoring
from diffusionlm.inference.requests import RequestOptions
from diffusionlm.inference.settings import resolve_settings
from diffusionlm.models.patterns import Bidirectional, BlockCausal
from diffusionlm.models.transformer import Transformer
from diffusionlm.serving.engine import Engine
from tests.conftest import MakeModel

VOCAB, MASK = 19, 18
TEXT = [1, 2, 3, 3, 9, 0, 17, 4, 4, 11, MASK]
"""A mask token in a text is text, and impossible."""
MODELS: dict[str, dict[str, Any]] = {
    "bidirectional": {},
    "blocks": {"block_length": 4},
    "shifted blocks": {"block_length": 4, "logit_alignment": "shifted"},
    "blocks of one token": {"block_length": 1},
    "autoregressive": {"block_length": 1, "logit_alignment": "shifted"},
}


@pytest.fixture
def model(request: pytest.FixtureRequest, tiny_model: MakeModel) -> Transformer:
    sizes = {"vocab_size": VOCAB, "mask_token_id": MASK, "max_position_embeddings": 256}
    return tiny_model(torch.float64, **sizes, **MODELS[request.param]).eval()


def score(model: Transformer, texts: list[list[int]], num_top: int = 0, **limits: Any) -> list[Generation]:
    """All at once, among other requests. What the settings do to answers does nothing here."""
    config = GenerationConfig(
        max_new_tokens=9,
        temperature=1.0,
        top_k=2,
        repetition_penalty=2.0,
        suppress_token_ids=(3, 4),
        stop_token_ids=(9,),
    )
    settings, options = resolve_settings(config, model.config), RequestOptions(num_top_logprobs=num_top)
    with Engine(model, cache_memory=1 << 20, **limits) as engine:
        others = [engine.submit([5, 6], config, seed) for seed in range(3)]
        requests = engine.submit_prepared([prepare_prompt_scoring(settings, text, options) for text in texts])
        results = [request.result(60) for request in [*requests, *others]]
    return results[: len(texts)]


def score_by_hand(model: Transformer, text: list[int]) -> tuple[list[float], list[int]]:
    """Log-probability of each token, and the most probable ones: of a forward of what is on its left, and masks."""
    length, shift = model.config.block_length, int(model.config.logit_alignment == "shifted")
    logprobs, best = [], []
    for position in range(shift, len(text)):
        canvas = [*text[:position], *[MASK] * (len(text) - position)]
        with torch.no_grad():
            pattern = Bidirectional() if length is None else BlockCausal(length)
            logits_V = model(torch.tensor([canvas]), pattern=pattern)[0, position - shift]
        logits_V[MASK] = -torch.inf
        logprobs.append(float(logits_V.log_softmax(0)[text[position]]))
        best.append(int(logits_V.argmax()))
    return logprobs, best


@pytest.mark.parametrize(
    "limits", [{}, {"max_num_batched_tokens": 3, "page_size": 4}, {"deterministic": True}], ids=str
)
@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_each_token_given_those_before(model: Transformer, limits: dict[str, Any]) -> None:
    first, second = score(model, [TEXT, TEXT[3:9]], num_top=2, **limits)
    for text, answer in ((TEXT, first), (TEXT[3:9], second)):
        expected, best = score_by_hand(model, text)
        assert answer.logprobs == pytest.approx(expected, abs=1e-9)
        assert [top[0][0] for top in answer.top_logprobs] == best and answer.token_ids == tuple(text)
    assert first.logprobs[-1] == -math.inf and math.isfinite(sum(first.logprobs[:-1]))


@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_their_sum_is_the_likelihood(model: Transformer) -> None:
    """Of a sampler that goes from left to right; with blocks of one token it is the exact chain."""
    text = torch.arange(2, 2 + SCORED_TOKENS + 9).remainder(MASK - 1)
    [answer] = score(model, [text.tolist()])
    config = GenerationConfig(remasking_strategy="sequential")
    report = sampler_likelihood(model, text[None], config=config)
    assert -sum(answer.logprobs) == pytest.approx(report.nats_per_token * len(answer.logprobs), abs=1e-8)
    is_chain = model.config.block_length == 1
    if is_chain:
        bound = nelbo(model, text[None], block_length=1, num_mc_samples=1)
        assert -sum(answer.logprobs) == pytest.approx(bound.nats_per_token * len(answer.logprobs), abs=1e-8)
    is_autoregressive = is_chain and model.config.logit_alignment == "shifted"
    assert answer.num_forwards == (2 if is_autoregressive else len(answer.logprobs)) <= report.num_forwards
