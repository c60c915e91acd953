"""Options of a request: biased logits, alternatives, salts; none touches a neighbor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from config.generation import GenerationConfig
from diffusionlm.inference.generate import Generation, generate
from diffusionlm.inference.requests import RequestOptions
from diffusionlm.models.patterns import BlockCausal
from diffusionlm.models.transformer import Transformer
from diffusionlm.serving.engine import Engine
from tests.conftest import MakeModel

MASK = 18
SUPPRESSED = 5
PROMPT = [1, 2, 3]
BIAS = {7: 2.5, 4: -3.0, MASK: 100.0, SUPPRESSED: 100.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "entropy": {"remasking_strategy": "entropy"},
    "sampled": {"temperature": 0.7, "top_k": 4},
    "remasking": {"remasking_strategy": "p2", "temperature": 1.0},
}


@pytest.fixture(scope="module")
def model(tiny_model: MakeModel) -> Transformer:
    return tiny_model(torch.float64, vocab_size=19, mask_token_id=MASK, block_length=4).eval()


def settings(**values: Any) -> GenerationConfig:
    return GenerationConfig.model_validate(
        {"max_new_tokens": 5, "stop_token_ids": (), "suppress_token_ids": (SUPPRESSED,), **values}
    )


def replay_logprobs(model: Transformer, answer: Generation, bias: Mapping[int, float]) -> list[torch.Tensor]:
    """Log-probabilities [V] in the place of each token, when it was committed; each by a forward of its whole text."""
    rows = []
    for index, step in enumerate(answer.step_map):
        position = len(PROMPT) + index
        text = [*PROMPT, *answer.token_ids]
        for other, other_step in enumerate(answer.step_map):
            if other_step >= step:
                text[len(PROMPT) + other] = MASK
        text = [*text, *[MASK] * 4][: (position // 4 + 1) * 4]
        with torch.no_grad():
            logits_V = model(torch.tensor([text]), pattern=BlockCausal(4))[0, position]
        for token, value in bias.items():
            logits_V[token] += value
        logits_V[[MASK, SUPPRESSED]] = -torch.inf
        rows.append(logits_V.log_softmax(0))
    return rows


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "remasking"])
def test_biased_distributions_and_their_alternatives(model: Transformer, name: str) -> None:
    config = settings(**CONFIGS[name])
    options = RequestOptions(logit_bias=BIAS, num_top_logprobs=3)
    with Engine(model, cache_bytes=1 << 16) as engine:
        request = engine.submit(PROMPT, config, 1, options)
        answer = request.result(30)
        state = request.state
    [without] = generate(model, [PROMPT], config, [1])
    assert answer.token_ids != without.token_ids and not {MASK, SUPPRESSED} & {*answer.token_ids}
    expected = replay_logprobs(model, answer, BIAS)
    assert answer.logprobs == pytest.approx(
        [float(row[token]) for row, token in zip(expected, answer.token_ids, strict=True)], abs=1e-9
    )
    for row, pairs in zip(expected, answer.top_logprobs, strict=True):
        order = row.argsort(descending=True)[:3].tolist()
        assert [token for token, _ in pairs] == order
        assert [logprob for _, logprob in pairs] == pytest.approx(row[order].tolist(), abs=1e-9)
    assert (state.token_ids, state.logprobs) == (answer.token_ids, answer.logprobs)
    assert state.top_logprobs == answer.top_logprobs


@pytest.mark.parametrize("name", ["sampled", "remasking"])
def test_options_change_no_neighbor(model: Transformer, name: str) -> None:
    config = settings(**CONFIGS[name])
    cases = [
        RequestOptions(),
        RequestOptions(logit_bias=dict.fromkeys(range(12), -100.0)),
        RequestOptions(num_top_logprobs=2),
        RequestOptions(logit_bias={3: math.log(5.0)}, num_top_logprobs=20, cache_salt="x"),
    ]
    with Engine(model, cache_bytes=1 << 18, has_prefix_cache=False) as engine:
        alone = [engine.submit(PROMPT, config, 2, options).result(30) for options in cases]
        together = [request.result(30) for request in [engine.submit(PROMPT, config, 2, options) for options in cases]]
    [plain] = generate(model, [PROMPT], config, [2])
    assert alone[0].token_ids == alone[2].token_ids == plain.token_ids
    assert set(alone[1].token_ids) <= set(range(12, 18))
    for ours, expected in zip(together, alone, strict=True):
        assert (ours.token_ids, ours.step_map) == (expected.token_ids, expected.step_map)
        assert ours.logprobs == pytest.approx(expected.logprobs, abs=1e-9)
        for pairs, other in zip(ours.top_logprobs, expected.top_logprobs, strict=True):
            assert [token for token, _ in pairs] == [token for token, _ in other]
            assert [logprob for _, logprob in pairs] == pytest.approx([logprob for _, logprob in other], abs=1e-9)
    assert [len(answer.top_logprobs) for answer in together] == [0, 0, 5, 5]
    assert {len(pairs) for pairs in together[2].top_logprobs} == {2}
    assert {len(pairs) for pairs in together[3].top_logprobs} == {17}, "what is impossible is no alternative"


def test_allowed_tokens_limit_alternatives_and_equals_are_in_order(tiny_model: MakeModel) -> None:
    model = tiny_model(torch.float64, vocab_size=19, mask_token_id=MASK, block_length=4).eval()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    options = RequestOptions(allowed_token_ids={3: (9, 2)}, logit_bias={9: math.log(3.0)}, num_top_logprobs=4)
    with Engine(model, cache_bytes=1 << 16) as engine:
        answer = engine.submit(PROMPT, settings(max_new_tokens=2), 0, options).result(30)
    assert answer.token_ids == (9, 9)
    first, second = (dict(pairs) for pairs in answer.top_logprobs)
    assert list(first) == [9, 2] and list(second) == [9, 0, 1, 2]
    assert list(first.values()) == pytest.approx([math.log(3 / 4), math.log(1 / 4)], abs=1e-12)
    assert list(second.values()) == pytest.approx([math.log(3 / 19), *[math.log(1 / 19)] * 3], abs=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (RequestOptions(num_top_logprobs=21), "num_top_logprobs = 21 must be 0 to 20"),
        (RequestOptions(logit_bias={19: 1.0}), "logit_bias: token 19 is outside the model's vocabulary"),
        (RequestOptions(logit_bias={3: math.nan}), "logit_bias of token 3 is nan: use a finite number"),
    ],
)
def test_wrong_options_are_refused(model: Transformer, options: RequestOptions, message: str) -> None:
    with Engine(model, cache_bytes=1 << 16) as engine, pytest.raises(ValueError, match=message):
        engine.submit(PROMPT, settings(), 0, options)
