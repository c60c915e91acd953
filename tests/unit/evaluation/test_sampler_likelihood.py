"""The exact likelihood of deterministic samplers: what is scored, in which rows; `test_sampler_truths` has the orders.

Shapes: B rows, L positions, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from config.generation import GenerationConfig
from diffusionlm.evaluation.sampler_likelihood import sampler_likelihood
from diffusionlm.inference.generate import generate
from diffusionlm.models.patterns import Bidirectional
from diffusionlm.models.transformer import Transformer
from tests.conftest import MakeModel

TOKENS = 3


def settings(**values: Any) -> GenerationConfig:
    return GenerationConfig.model_validate(values)


@pytest.fixture(scope="module")
def small(tiny_model: MakeModel) -> MakeModel:
    """``small(**config)``: three tokens and the mask, in fp64."""

    def make(**config: Any) -> Transformer:
        sizes = {"vocab_size": TOKENS + 1, "mask_token_id": TOKENS, "eos_token_id": None, "pad_token_id": None}
        return tiny_model(torch.float64, **{**sizes, **config}).eval()

    return make


def by_hand(model: Transformer, text: list[int], order: list[list[int]], pattern: Any) -> float:
    """Nats of a text revealed in groups of positions."""
    mask, nats = model.config.required_mask_token_id, 0.0
    hidden = {position for group in order for position in group}
    for group in order:
        canvas = [mask if position in hidden else token for position, token in enumerate(text)]
        with torch.no_grad():
            logits_LV = model(torch.tensor([canvas]), pattern=pattern)[0].clone()
        logits_LV[:, mask] = float("-inf")
        logprobs_LV = logits_LV.log_softmax(dim=1)
        shift = int(model.config.logit_alignment == "shifted")
        nats -= sum(float(logprobs_LV[position - shift, text[position]]) for position in group)
        hidden -= set(group)
    return nats


@pytest.mark.parametrize("alignment", ["same_position", "shifted"])
def test_prompts_are_seen_and_not_scored(small: MakeModel, alignment: str) -> None:
    model = small(logit_alignment=alignment)
    text = [2, 0, 1, 1, 2, 0, 0]
    tokens_BL = torch.tensor([text])
    loss_mask_BL = torch.tensor([[False, True, False, True, True, False, True]])
    config = settings(remasking_strategy="sequential", denoising_steps=1, block_length=2)
    report = sampler_likelihood(model, tokens_BL, loss_mask_BL, config)
    assert report.nats == pytest.approx(by_hand(model, text, [[1, 3], [4, 6]], Bidirectional()), abs=1e-9)
    assert (report.num_tokens, report.num_forwards) == (4, 2)
    assert tokens_BL.tolist() == [text]


def test_a_mask_token_in_the_data_is_text(small: MakeModel) -> None:
    model, text = small(), [2, TOKENS, 1, 0]
    report = sampler_likelihood(model, torch.tensor([text]), config=settings(remasking_strategy="sequential"))
    assert report.nats == pytest.approx(by_hand(model, text, [[0], [2], [3]], Bidirectional()), abs=1e-9)
    assert report.num_tokens == 3


@pytest.mark.parametrize("attention", ["bidirectional", "block_causal"])
def test_rows_of_different_lengths_and_packed_ones(small: MakeModel, attention: str) -> None:
    model = small()
    texts = [[2, 0, 1, 1, 2, 0], [1, 0, 2], [0, 0, 2, 1, 1], [1]]
    config = settings(attention=attention, block_length=2, denoising_steps=1)
    alone = [sampler_likelihood(model, torch.tensor([text]), config=config).nats for text in texts]
    tokens_BL, documents_BL = torch.zeros(4, 9, dtype=torch.int64), torch.full((4, 9), -1)
    for row, text in enumerate(texts):
        tokens_BL[row, : len(text)], documents_BL[row, : len(text)] = torch.tensor(text), 0
    padded = sampler_likelihood(model, tokens_BL, config=config, document_BL=documents_BL, batch_size=3)
    assert padded.row_nats == pytest.approx(alone, abs=1e-9)
    assert padded.num_tokens == sum(map(len, texts))
    packed = torch.tensor([[*texts[0], *texts[1]], [*texts[2], *texts[3], 0, 0, 0]])
    numbers = torch.tensor([[0] * 6 + [1] * 3, [0] * 5 + [1] + [-1] * 3])
    together = sampler_likelihood(model, packed, config=config, document_BL=numbers)
    assert together.row_nats == pytest.approx([alone[0] + alone[1], alone[2] + alone[3]], abs=1e-9)


def test_likelihood_matches_sequential_generation(small: MakeModel) -> None:
    model = small()
    config = settings(remasking_strategy="sequential", temperature=1.0, max_new_tokens=6, stop_token_ids=())
    [done] = generate(model, [[1, 2]], config)
    assert done.step_map == (1, 2, 3, 4, 5, 6)
    tokens_BL = torch.tensor([[1, 2, *done.token_ids]])
    loss_mask_BL = torch.arange(8)[None] >= 2
    report = sampler_likelihood(model, tokens_BL, loss_mask_BL, config)
    assert report.nats == pytest.approx(-sum(done.logprobs), abs=1e-9)


def test_refusals(small: MakeModel) -> None:
    model, tokens_BL = small(), torch.tensor([[0, 1, 2]])
    for strategy in ("random", "p2"):
        with pytest.raises(ValueError, match=f'"{strategy}" has no exact likelihood.*low_confidence, sequential'):
            sampler_likelihood(model, tokens_BL, config=settings(remasking_strategy=strategy))
    for values, words in (
        ({"temperature": 0.5}, "temperature = 0.5"),
        ({"suppress_token_ids": [1]}, "suppress_token_ids = "),
        ({"cache": "prefix"}, "cache = prefix"),
        ({"alg_temp": 1.0}, "alg_temp = 1.0 has no exact likelihood"),
        ({"block_length": 1, "steps": 2}, "steps = 2 .* 3 .block_length = 1"),
        ({"attention": "block_causal"}, "needs block_length"),
    ):
        with pytest.raises(ValueError, match=words):
            sampler_likelihood(model, tokens_BL, config=settings(**values))
    with pytest.raises(ValueError, match="no target token"):
        sampler_likelihood(model, tokens_BL, torch.zeros(1, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="batch_size = 0"):
        sampler_likelihood(model, tokens_BL, batch_size=0)
    autoregressive = small(mask_token_id=None, block_length=1, logit_alignment="shifted")
    with pytest.raises(ValueError, match="no mask token"):
        sampler_likelihood(autoregressive, tokens_BL, config=settings(attention="bidirectional"))
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        sampler_likelihood(model, tokens_BL)
