"""Answers under constraints: all conform, in any company. `test_joint.py` has their distribution."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from config.generation import GenerationConfig
from diffusionlm.inference import decoder as decoder_module
from diffusionlm.inference import scheduler as scheduler_module
from diffusionlm.inference.constraints.byte_automaton import compile_expression
from diffusionlm.inference.constraints.compiler import TokenConstraint
from diffusionlm.inference.constraints.expressions import parse_regex
from diffusionlm.inference.constraints.sampler import constrain_predictions
from diffusionlm.inference.constraints.token_automaton import TokenTrie
from diffusionlm.inference.decoder import Decoder
from diffusionlm.inference.generate import decode, generate, infill, stream, to_generation
from diffusionlm.inference.healing import HealedText
from diffusionlm.inference.request_builder import prepare_request
from diffusionlm.inference.requests import RequestOptions
from diffusionlm.inference.sampling.token_sampler import LogitRows
from diffusionlm.inference.settings import resolve_settings
from diffusionlm.inference.strategies import STRATEGIES
from diffusionlm.models.patterns import Bidirectional
from diffusionlm.models.transformer import Transformer
from tests.decoding_jobs import add_requests, assert_same, drain, limit_decoder, settings_of

EOS, MASK, V = 21, 22, 23
LETTERS = [b"a", b"b", b"c", b"d"]
TEXTS = [*LETTERS, b"ab", b"ba", b"abc", b"ca", b"\xc3", b"\xa9", b"dd", b"bcd"]
"""Tokens from 12 to 20 stand for no text."""


def make_constraint(pattern: str, texts: list[bytes] = TEXTS) -> TokenConstraint:
    trie = TokenTrie.from_texts(range(len(texts)), texts, V)
    return TokenConstraint(compile_expression(parse_regex(pattern)), trie)


def to_text(token_ids: tuple[int, ...]) -> str:
    assert all(token < len(TEXTS) for token in token_ids)
    return b"".join(TEXTS[token] for token in token_ids).decode()


PATTERNS = ["(ab|c)+d?", "[abd]{5,9}é", "abc|bad|éé(ca)*", "(a|b|cd){10,12}"]
EXTRA: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.3, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.5},
]


CONFIGS = [
    pytest.param(name, index, marks=[] if number % 2 == 0 and number // 2 % 3 == index else [pytest.mark.slow])
    for number, name in enumerate(sorted(STRATEGIES))
    for index in range(3)
]


@pytest.mark.parametrize(("name", "index"), CONFIGS)
def test_every_answer_conforms(model: Transformer, name: str, index: int) -> None:
    """Whatever the order; in blocks and as one block, block-causal and not, greedily and sampled, with and without a
    cache."""
    patterns = PATTERNS[index : index + 2]
    constraints = [make_constraint(pattern) for pattern in patterns]
    config = GenerationConfig(max_new_tokens=9, remasking_strategy=name, block_length=(4, 9, 3)[index], **EXTRA[index])
    changes: tuple[dict[str, Any], ...] = ({}, {"cache": "dual"}, {"attention": "block_causal"})
    config = config.model_copy(update=changes[index])
    results = generate(model, [[1, 2]] * 2, config, constraints=constraints)
    for pattern, result in zip(patterns, results, strict=True):
        assert re.fullmatch(pattern, to_text(result.token_ids)), (pattern, result)
        assert all(np.isfinite(result.logprobs)) and max(result.logprobs, default=0.0) < 1e-9


@pytest.mark.parametrize(
    ("name", "temperature", "deferred"),
    [("low_confidence", 0.0, ()), ("low_confidence", 0.8, ()), ("entropy", 0.8, ()), ("topk_margin", 0.0, ()),
     ("p2", 0.0, ()), ("p2", 0.8, ()), ("random", 0.8, ()), ("threshold", 0.8, ()), ("remdm_cap", 0.8, ()),
     ("low_confidence", 0.0, (1, 3)), ("entropy", 0.8, (1, 3))],
)  # fmt: skip
def test_independent_positions_are_allowed_tokens(
    model: Transformer, name: str, temperature: float, deferred: tuple[int, ...]
) -> None:
    """Where the pattern says nothing of two positions together, it is the same as `allowed_token_ids`: tokens, order,
    forwards and log-probabilities."""
    constraint = make_constraint("[ab][bcd][abc][d][ac]", LETTERS)
    sets = ["ab", "bcd", "abc", "d", "ac"]
    allowed = {3 + i: [LETTERS.index(letter.encode()) for letter in letters] for i, letters in enumerate(sets)}
    config = GenerationConfig(
        remasking_strategy=name,
        temperature=temperature,
        steps=3 if name != "threshold" else None,
        defer_token_ids=deferred,
    )
    canvas = [5, 6, 7, *[MASK] * 5, 9, MASK, 4]
    seeds = range(3)
    ours = infill(model, [canvas] * 3, config, seeds, constraints=[[constraint, None]] * 3)
    expected = infill(model, [canvas] * 3, config, seeds, allowed_token_ids=[allowed] * 3)
    for left, right in zip(ours, expected, strict=True):
        assert_same(left, right)


def test_neighbors_without_constraints(blocks: Transformer) -> None:
    """Alone and in a batch of constrained and other requests: the same answers."""
    constraints = [make_constraint(PATTERNS[0]), None, make_constraint(PATTERNS[1]), None, make_constraint(PATTERNS[3])]
    config = GenerationConfig(max_new_tokens=9, temperature=0.9)
    prompts = [[1, 2, 3], [4], [5, 6], [7] * 6, [8, 9, 10, 11]]
    together = generate(blocks, prompts, config, constraints=constraints)
    free = generate(blocks, prompts, config)
    for index, (prompt, constraint) in enumerate(zip(prompts, constraints, strict=True)):
        [alone] = generate(blocks, [prompt], config, [index], constraints=[constraint])
        for other in (together[index], *([free[index]] if constraint is None else [])):
            assert_same(other, alone)


@pytest.mark.parametrize("pauses", [True, False])
def test_a_slow_constraint_lets_others_go_ahead(
    pauses: bool, blocks: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For as long as its own step took, and not once it is alone; its answer stays the same. Only where a server asks
    for it: elsewhere forwards do not depend on the clock."""
    constraint, config = make_constraint("[abd]+"), GenerationConfig(max_new_tokens=9, stop_token_ids=())
    [expected] = generate(blocks, [[1]], config, constraints=[constraint])
    seconds = [0]

    def read_clock() -> int:
        seconds[0] += 1  # each step takes a second
        return seconds[0]

    monkeypatch.setattr(scheduler_module, "time", SimpleNamespace(perf_counter=read_clock))

    def constrain_slowly(logits: LogitRows, predictions: Any) -> Any:
        results = constrain_predictions(logits, predictions)
        for request in logits.requests:
            request.paused_until = seconds[0] + 3.5 if request.span_cursors else 0.0
        return results

    monkeypatch.setattr(decoder_module, "constrain_predictions", constrain_slowly)
    settings = resolve_settings(config, blocks.config)
    decoder = Decoder(blocks, *limit_decoder(20), pauses_slow_constraints=pauses)
    options = RequestOptions(constraints=[constraint])
    slow, other = add_requests(decoder, prepare_request(settings, [1], options=options), prepare_request(settings, [1]))
    turns: list[str] = []
    while decoder.has_work:
        turns.append("".join("s" if request is slow else "o" for request in decoder.step().decoded))
    assert "".join(turns).count("o") == other.num_forwards
    first = next(index for index, turn in enumerate(turns) if "s" in turn)
    assert turns[first : first + 4] == (["so", "o", "o", "o"] if pauses else ["so"] * 4)
    last = max(index for index, turn in enumerate(turns) if "o" in turn)
    assert set(turns[last + 1 :]) == ({"s"} if pauses else set())
    assert_same(to_generation(slow), expected)


def test_a_failure_in_a_constraint_ends_its_request_alone(
    blocks: Transformer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config, broken, whole = GenerationConfig(max_new_tokens=9), make_constraint("[abd]+"), make_constraint("[abd]+")
    [expected] = generate(blocks, [[1]], config, constraints=[whole])
    settings = resolve_settings(config, blocks.config)
    monkeypatch.delattr(broken.token_automaton(settings, can_stop=True), "classes_E")
    decoder = Decoder(blocks, *limit_decoder(20))
    failed, other = add_requests(
        decoder,
        *(prepare_request(settings, [1], options=RequestOptions(constraints=[item])) for item in (broken, whole)),
    )
    drain(decoder, failed, other)
    assert isinstance(failed.error, AttributeError) and "decoding a request has failed" in caplog.text
    assert_same(to_generation(other), expected)


def test_order_of_forced_tokens_alone_and_mixed(blocks: Transformer) -> None:
    """Forced tokens have exactly the log-probability 0, so that rounding does not decide which one comes first."""
    letters = [bytes([code]) for code in b'abcd{}":12']
    constraint = make_constraint(r'\{"a":[12]+\}[a-d]{0,9}', letters)
    config = GenerationConfig(max_new_tokens=12)
    prompts = [[1 + index % 7] * (1 + index % 5) for index in range(20)]
    mixed = generate(blocks, prompts, config, constraints=[constraint] * 20)
    for index in range(0, 20, 4):
        [alone] = generate(blocks, [prompts[index]], config, [index], constraints=[constraint])
        assert (alone.token_ids, alone.step_map) == (mixed[index].token_ids, mixed[index].step_map)
        assert alone.logprobs[:5] == mixed[index].logprobs[:5] == (0.0,) * 5
        assert max(mixed[index].logprobs) == 0.0


def test_top_logprobs_are_those_of_the_restricted_distribution(blocks: Transformer) -> None:
    options = RequestOptions(constraints=[make_constraint("[abd]{4}", LETTERS)], num_top_logprobs=5)
    [result] = decode(blocks, [prepare_request(settings_of(blocks), [1], options=options)])
    for token, logprob, top in zip(result.token_ids, result.logprobs, result.top_logprobs, strict=True):
        assert {other for other, _ in top} == {0, 1, 3} and dict(top)[token] == pytest.approx(logprob)
        assert sum(np.exp(value) for _, value in top) == pytest.approx(1.0)


@pytest.mark.parametrize("min_new_tokens", range(5))
def test_a_stop_token_that_comes_too_early_is_no_way_to_complete_a_text(
    model: Transformer, min_new_tokens: int
) -> None:
    """The most probable answer is that of an enumeration. "a" needs a second token then, or cannot be at all."""
    config = GenerationConfig(
        max_new_tokens=4, remasking_strategy="random", denoising_steps=1, stop_token_ids=(EOS,),
        min_new_tokens=min_new_tokens,
    )  # fmt: skip
    options = RequestOptions(constraints=[make_constraint("a|abab?|ca(d|dd)?", LETTERS)], logit_bias={EOS: 9.0})
    request = prepare_request(resolve_settings(config, model.config), [1, 2], options=options)
    [answer] = decode(model, [request])
    with torch.no_grad():
        logits_LV = model(torch.tensor([[1, 2, *[MASK] * 4]]), pattern=Bidirectional())[0]
    logits_LV[:, EOS] += 9.0
    logits_LV[:, MASK] = -torch.inf
    scores = {}
    for text in ("a", "aba", "abab", "ca", "cad", "cadd"):
        ids = [LETTERS.index(letter.encode()) for letter in text]
        rest = logits_LV[2 + len(ids) :].amax(dim=1)
        if len(ids) < 4:
            rest[0] = logits_LV[2 + len(ids), EOS]
        if len(ids) >= min_new_tokens:
            scores[text] = float(sum(logits_LV[2 + index, token] for index, token in enumerate(ids)) + rest.sum())
    assert to_text(answer.token_ids) == max(scores, key=scores.__getitem__)
    assert (min_new_tokens > 2) == (len(answer.token_ids) > 2)


@pytest.mark.parametrize(
    ("pattern", "tokens", "message"),
    [
        ("[abd]{40}", 9, "prompt 0: the constraint needs at least 20 tokens, and there are 9"),
        ("a|b", 2, "prompt 0: no text of exactly 2 tokens fits the constraint"),
        ("a|ab", 4, "prompt 0: no text of min_new_tokens (min_tokens) = 3 to 4 tokens fits the constraint"),
    ],
)
def test_what_cannot_be_met_is_refused(model: Transformer, pattern: str, tokens: int, message: str) -> None:
    is_early = "min_new_tokens" in message
    stops = (EOS,) if is_early else ()
    config = GenerationConfig(max_new_tokens=tokens, stop_token_ids=stops, min_new_tokens=3 * is_early)
    with pytest.raises(ValueError, match=re.escape(message)):
        generate(model, [[1]], config, constraints=[make_constraint(pattern)])


def test_wrong_numbers_of_constraints(model: Transformer) -> None:
    with pytest.raises(ValueError, match="constraints: 2 for 1 requests"):
        generate(model, [[1]], GenerationConfig(), constraints=[None, None])
    with pytest.raises(ValueError, match="canvas 0: 1 constraints for 2 masked spans"):
        infill(model, [[1, MASK, 2, MASK]], GenerationConfig(), constraints=[[None]])
    with pytest.raises(ValueError, match="canvas 0: masked span 2: no text of exactly 1 tokens"):
        infill(model, [[1, MASK, 2, MASK]], GenerationConfig(), constraints=[[None, make_constraint("ad|")]])


def test_allowed_tokens_within_a_span(model: Transformer) -> None:
    """Also in a block that is decoded later."""
    canvas, constraint = [1, *[MASK] * 6, 2], make_constraint("(ab|cd)+")
    config = GenerationConfig(block_length=2, temperature=1.0)
    for seed in range(5):
        [result] = infill(model, [canvas], config, [seed], allowed_token_ids=[{5: [2, 9]}], constraints=[[constraint]])
        assert result.token_ids[5] == 2 and re.fullmatch("(ab|cd)+", to_text(result.token_ids[1:7]))
    with pytest.raises(ValueError, match="with the tokens that are allowed in their places, fits"):
        infill(model, [canvas], config, allowed_token_ids=[{5: [10]}], constraints=[[constraint]])


def test_stream(blocks: Transformer) -> None:
    class _Letters:
        def token_bytes(self, token_id: int) -> bytes:
            return to_text((token_id,)).encode()

    config = GenerationConfig(max_new_tokens=8)
    pieces = stream(blocks, _Letters(), [1], config, constraint=make_constraint("(abc)*cd"))  # type: ignore[arg-type]
    assert re.fullmatch("(abc)*cd", "".join(pieces))
    # The first token begins with "a" again.
    healed = HealedText((1,), RequestOptions(allowed_token_ids={1: [0, 4, 6]}, repeated_bytes=[b"a"]))
    pieces = stream(blocks, _Letters(), healed, config, constraint=make_constraint("(bc)*cd"))  # type: ignore[arg-type]
    assert re.fullmatch("(bc)*cd", "".join(pieces))
