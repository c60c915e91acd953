"""Log-likelihoods of answers after contexts with images, against forwards of whole texts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from config.evaluation.likelihood import AnswerLikelihoodConfig
from config.generation import GenerationConfig
from diffusionlm.evaluation.likelihood.scoring import OptionsRequest, conditional_likelihood, score_documents
from diffusionlm.evaluation.sampler_likelihood import greedy_matches, sampler_likelihood
from diffusionlm.inference.generate import generate
from diffusionlm.inference.images import expand_images
from diffusionlm.inference.requests import RequestOptions
from diffusionlm.models.patterns import Bidirectional, BlockCausal
from diffusionlm.models.transformer import Transformer
from diffusionlm.vision.images import EncodedImage, PlacedImage
from tests.image_requests import (
    IMAGE,
    MASK,
    PROCESSOR,
    compute_logits,
    compute_masked_logits,
    make_vision_model,
    paint,
    write_prompt,
)

CASES: dict[str, dict[str, Any]] = {
    "bidirectional": {},
    "blocks": {"block_length": 4},
    "shifted blocks": {"block_length": 4, "logit_alignment": "shifted"},
    "causal": {"block_length": 1, "logit_alignment": "shifted", "mask_token_id": None},
}
PARTS: list[list[int | EncodedImage]] = [[5, 6, paint(2, 3), 7], [5, 6, paint(2, 3, 1), 7], [paint(3, 1)]]


def build_request(model: Transformer, parts: list[int | EncodedImage], *options: tuple[int, ...]) -> OptionsRequest:
    text = expand_images(*write_prompt(*parts), PROCESSOR, model.config)
    return OptionsRequest(text.token_ids, options, context_options=text.options)


def score_in_full_forwards(
    model: Transformer, request: OptionsRequest, answer: tuple[int, ...], *excluded: int
) -> float:
    """Sum of the log-probabilities of tokens that are alone in their block, or of a causal model."""
    size, shift = model.config.block_length, int(model.config.logit_alignment == "shifted")
    pattern, total, text = Bidirectional() if size is None else BlockCausal(size), 0.0, [*request.context]
    for token in answer:
        canvas = [*text, token if model.config.is_autoregressive else MASK]
        logits_V = compute_logits(model, canvas, request.context_options.images, pattern)[len(text) - shift].clone()
        if model.config.mask_token_id is not None:
            logits_V[[MASK, *excluded]] = -torch.inf
        total += float(logits_V.log_softmax(-1)[token])
        text.append(token)
    return total


@pytest.mark.parametrize("name", CASES)
def test_answers_of_one_token(name: str) -> None:
    """Texts that differ in their image alone have values of their own, in one batch as alone."""
    model = make_vision_model(**CASES[name])
    requests = [build_request(model, parts, (9,), (8,)) for parts in PARTS]
    scores = score_documents(model, requests)
    for request, score in zip(requests, scores, strict=True):
        expected = [score_in_full_forwards(model, request, option) for option in request.options]
        assert score.log_likelihoods == pytest.approx(expected, abs=1e-9) and score.is_exact
        assert score_documents(model, [request])[0].log_likelihoods == pytest.approx(expected, abs=1e-9)
    assert len({score.log_likelihoods for score in scores}) == 3


def test_copies_of_blocks_share_a_context_with_an_image() -> None:
    """Options of other lengths after a context that ends within a block; causal ones are sums over their tokens."""
    model = make_vision_model(block_length=4)
    options = ((9,), (9, 8), (7, 9, 9, 1, 2, 3))
    config = AnswerLikelihoodConfig(max_enumerated_forwards=64, num_mc_samples=64)
    request = build_request(model, [5, 6, paint(2, 3)], *options)
    together = score_documents(model, [request], config)[0].log_likelihoods
    alone = [score_documents(model, [replace(request, options=(option,))], config)[0] for option in options]
    assert together == pytest.approx([score.log_likelihood for score in alone], abs=1e-9)
    causal = make_vision_model(**CASES["causal"])
    scores = score_documents(causal, [request])[0].log_likelihoods
    assert scores == pytest.approx([score_in_full_forwards(causal, request, option) for option in options], abs=1e-9)


def test_conditional_likelihood() -> None:
    model = make_vision_model()
    values = []
    for parts in PARTS[:2]:
        request = build_request(model, parts, (9,))
        text = expand_images(*write_prompt(*parts), PROCESSOR, model.config)
        values.append(conditional_likelihood(model, text, [9]).log_likelihood)
        assert values[-1] == pytest.approx(score_in_full_forwards(model, request, (9,)), abs=1e-9)
    assert abs(values[0] - values[1]) > 1e-3


def test_guidance_masks_the_context_at_the_same_position_ids() -> None:
    """An enumerated bound of two tokens is the mean over both orders."""
    model, answer = make_vision_model(), {-2: 9, -1: 8}
    request = build_request(model, PARTS[0], tuple(answer.values()))
    images, total = request.context_options.images, 0.0
    for order in ((-2, -1), (-1, -2)):
        canvas, masked = [*request.context, MASK, MASK], [MASK] * (len(request.context) + 2)
        for position in order:
            given_LV = compute_logits(model, canvas, images, Bidirectional())
            masked_LV = compute_masked_logits(model, masked, images, Bidirectional())
            logits_V = masked_LV[position] + 1.5 * (given_LV - masked_LV)[position]
            logits_V[MASK] = -torch.inf
            canvas[position] = masked[position] = answer[position]
            total += float(logits_V.log_softmax(-1)[answer[position]]) / 2
    guided = score_documents(model, [request], AnswerLikelihoodConfig(cfg_scale=0.5))[0]
    assert guided.is_exact and guided.log_likelihood == pytest.approx(total, abs=1e-9)


def test_greedy_matches_read_the_image() -> None:
    model = make_vision_model(block_length=4)
    requests = []
    for parts in PARTS[:2]:
        text, images = write_prompt(*parts)
        config = GenerationConfig(max_new_tokens=6, remasking_strategy="low_confidence", stop_token_ids=())
        [answer] = generate(model, [text], config, images=[images], processor=PROCESSOR)
        requests.append(build_request(model, parts, answer.token_ids))
    exchanged = [replace(own, options=other.options) for own, other in zip(requests, requests[::-1], strict=True)]
    assert greedy_matches(model, [*requests, *exchanged]) == [True, True, False, False]


def test_samplers_read_the_images_of_documents() -> None:
    """Three documents in a row, whose answer of one token is what a forward of each alone predicts."""
    model = make_vision_model(block_length=4)
    requests = [build_request(model, parts, (9,)) for parts in (PARTS[2], PARTS[0], PARTS[1])]
    expected = [score_in_full_forwards(model, request, (9,), IMAGE) for request in requests]
    texts = [[*request.context, 9] for request in requests]
    tokens = torch.tensor([token for text in texts for token in text])
    numbers = torch.repeat_interleave(torch.arange(3), torch.tensor([len(text) for text in texts]))
    start, images = 0, list[PlacedImage]()
    for request, text in zip(requests, texts, strict=True):
        images += [placed.move(start) for placed in request.context_options.images]
        start += len(text)
    options = RequestOptions(images=tuple(images), processor=PROCESSOR)
    is_answer = numbers.diff(append=torch.tensor([3])) > 0
    report = sampler_likelihood(model, tokens[None], is_answer[None], document_BL=numbers[None], row_options=[options])
    assert report.nats == pytest.approx(-sum(expected), abs=1e-9) and report.num_tokens == 3
    everything = sampler_likelihood(model, tokens[None], document_BL=numbers[None], row_options=[options])
    assert everything.num_tokens == int((tokens != IMAGE).sum())


def test_placeholders_that_are_not_those_of_the_images_are_refused() -> None:
    model = make_vision_model()
    request = build_request(model, PARTS[0], (9,))
    with pytest.raises(ValueError, match=r"option 0 of document 0: the text has 6 image placeholders .* 0 images"):
        score_documents(model, [replace(request, context_options=RequestOptions())])
    with pytest.raises(ValueError, match=r"option 0 of document 0: the text has 7 image placeholders .* 1 images"):
        score_documents(model, [replace(request, options=((IMAGE,),))])
