"""Options of a request: biased and penalized logits, early stop tokens, alternatives, salts; none touches a
neighbor."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from config.generation import GenerationConfig
from diffusionlm.inference.generate import DecodingStep, Generation, decode, generate
from diffusionlm.inference.request_builder import prepare_request
from diffusionlm.inference.requests import PreparedRequest, RequestOptions
from diffusionlm.inference.settings import resolve_settings
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


STOPS = (7, 11)
PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"presence_penalty": 1.5, "frequency_penalty": -0.5, "min_new_tokens": 6},
    {"repetition_penalty": 0.6, "presence_penalty": -1.0, "frequency_penalty": 2.0, "cache": "none"},
]


def replay(model: Transformer, request: PreparedRequest) -> tuple[Generation, list[torch.Tensor]]:
    """The answer of a request alone, and the log-probabilities [V] in the place of each token: each by a forward of the
    canvas before, with the bias and vLLM's formula, token by token."""
    config, steps = request.settings.config, list[DecodingStep]()
    [answer] = decode(model, [request], steps.append)
    length = len(answer.token_ids)
    canvases = [[*PROMPT, *[MASK] * 9], *(list(step.canvases[0].token_ids) for step in steps)]
    rows = []
    for index, forward in enumerate(answer.step_map[:length]):
        position, canvas = len(PROMPT) + index, canvases[forward - 1]
        with torch.no_grad():
            logits_LV = model(torch.tensor([canvas[: (position // 4 + 1) * 4]]), pattern=BlockCausal(4))[0]
        logits_V = logits_LV[position]
        for biased, value in request.options.logit_bias.items():
            logits_V[biased] += value
        committed = [other for other in canvas[len(PROMPT) :] if other != MASK]
        for other in {*PROMPT, *committed}:
            factor = config.repetition_penalty
            logits_V[other] = logits_V[other] / factor if logits_V[other] > 0 else logits_V[other] * factor
        for other in {*committed}:
            logits_V[other] -= config.frequency_penalty * committed.count(other) + config.presence_penalty
        logits_V[[MASK, SUPPRESSED, *(STOPS if index < config.min_new_tokens else ())]] = -torch.inf
        rows.append(logits_V.log_softmax(0))
    return answer, rows


def logprobs_of(rows: list[torch.Tensor], answer: Generation) -> Any:
    return pytest.approx([float(row[token]) for row, token in zip(rows, answer.token_ids, strict=True)], abs=1e-9)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "remasking"])
def test_biased_distributions_and_their_alternatives(model: Transformer, name: str) -> None:
    config = settings(**CONFIGS[name], max_new_tokens=9)
    options = RequestOptions(logit_bias=BIAS, num_top_logprobs=3)
    with Engine(model, cache_memory=1 << 16) as engine:
        request = engine.submit(PROMPT, config, 1, options)
        answer, state = request.result(30), request.state
    [without] = generate(model, [PROMPT], config, [1])
    assert answer.token_ids != without.token_ids and not {MASK, SUPPRESSED} & {*answer.token_ids}
    alone, rows = replay(model, prepare_request(resolve_settings(config, model.config), PROMPT, 1, options))
    assert answer.token_ids == alone.token_ids and answer.logprobs == logprobs_of(rows, answer)
    for row, pairs in zip(rows, answer.top_logprobs, strict=True):
        order = row.argsort(descending=True)[:3].tolist()
        assert [token for token, _ in pairs] == order
        assert [logprob for _, logprob in pairs] == pytest.approx(row[order].tolist(), abs=1e-9)
    assert (state.token_ids, state.logprobs) == (answer.token_ids, answer.logprobs)
    assert state.top_logprobs == answer.top_logprobs


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "remasking"])
def test_penalties_and_early_stop_tokens(model: Transformer, name: str) -> None:
    """Tokens that are committed count in later forwards, also of other blocks, and the bias comes first. The same in a
    batch of different penalties."""
    requests = []
    for number, penalties in enumerate([*PENALTIES, {}]):
        values = {**CONFIGS[name], "max_new_tokens": 9, "denoising_steps": 3, "stop_token_ids": STOPS, **penalties}
        options = RequestOptions(logit_bias={11: 2.0 if number == 1 else -50.0, 2: 4.0, 9: 1.0})
        requests.append(prepare_request(resolve_settings(settings(**values), model.config), PROMPT, 3, options))
    together = decode(model, requests)
    for request, answer in zip(requests, together, strict=True):
        alone, rows = replay(model, request)
        assert (answer.token_ids, answer.step_map) == (alone.token_ids, alone.step_map)
        assert answer.logprobs == logprobs_of(rows, answer)
    assert len({answer.token_ids for answer in together}) == 4


@pytest.mark.parametrize("name", CONFIGS)
def test_no_stop_token_among_the_first_ones(model: Transformer, name: str) -> None:
    """The next one is it, where a stop token is all but certain."""
    options = RequestOptions(logit_bias={7: 60.0})
    for count in (0, 1, 4, 5, 9):
        config = settings(**CONFIGS[name], max_new_tokens=9, stop_token_ids=STOPS, min_new_tokens=count)
        [answer] = decode(model, [prepare_request(resolve_settings(config, model.config), PROMPT, 3, options)])
        assert len(answer.token_ids) == count and not {*STOPS} & {*answer.token_ids}


def test_allowed_tokens_limit_alternatives_and_equals_are_in_order(tiny_model: MakeModel) -> None:
    model = tiny_model(torch.float64, vocab_size=19, mask_token_id=MASK, block_length=4).eval()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    options = RequestOptions(allowed_token_ids={3: (9, 2)}, logit_bias={9: math.log(3.0)}, num_top_logprobs=4)
    with Engine(model, cache_memory=1 << 16) as engine:
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
    with Engine(model, cache_memory=1 << 16) as engine, pytest.raises(ValueError, match=message):
        engine.submit(PROMPT, settings(), 0, options)
