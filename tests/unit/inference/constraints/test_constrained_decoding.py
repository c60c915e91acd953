"""Answers under constraints: all conform, and their distribution is the model's own, restricted."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from config.generation import GenerationConfig
from diffusionlm.inference import decoder as decoder_module
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
from diffusionlm.inference.sampling import LogitRows
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
    return TokenConstraint(compile_expression(parse_regex(pattern).expression), trie)


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


def test_infill_constrains_each_span(model: Transformer, blocks: Transformer) -> None:
    canvas = [1, 2, *[MASK] * 5, 3, 4, *[MASK] * 3, 7, *[MASK] * 4, 5]
    patterns = ["(ab|c)+", "[ad]{3}", "é+"]
    constraints = [make_constraint(patterns[0]), None, make_constraint(patterns[2])]
    for which, options in ((model, {"block_length": 4}), (model, {"steps": 5, "temperature": 1.0}), (blocks, {})):
        [result] = infill(which, [canvas], GenerationConfig(**options), constraints=[constraints])
        assert re.fullmatch(patterns[0], to_text(result.token_ids[2:7]))
        assert re.fullmatch(patterns[2], to_text(result.token_ids[13:17]))
        kept = [index for index, token in enumerate(canvas) if token != MASK]
        assert [result.token_ids[index] for index in kept] == [canvas[index] for index in kept]


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


@pytest.mark.parametrize("count", [250, pytest.param(3000, marks=pytest.mark.slow)])
def test_distribution_of_one_forward(model: Transformer, count: int) -> None:
    """Chi-square over all answers of three tokens: the product of the model's marginals, restricted and normalized."""
    pattern, prompt = "a(b|ca|bc)*d?|ba.*", [3, 1]
    allowed = {tuple(answer) for answer in np.ndindex(12, 12, 12) if _matches(pattern, answer)}
    config = GenerationConfig(max_new_tokens=3, steps=1, temperature=1.0, stop_token_ids=())
    with torch.no_grad():
        probs_LV = model(torch.tensor([[*prompt, *[MASK] * 3]]), pattern=Bidirectional())[0, len(prompt) :].softmax(
            dim=1
        )
    weights = {answer: float(probs_LV[range(3), answer].prod()) for answer in allowed}
    total = sum(weights.values())
    results = generate(model, [prompt] * count, config, constraints=[make_constraint(pattern)] * count)
    assert {result.num_forwards for result in results} == {1}
    counts: dict[tuple[int, ...], int] = {}
    for result in results:
        counts[result.token_ids] = counts.get(result.token_ids, 0) + 1
    assert counts.keys() <= allowed
    frequent = [answer for answer in allowed if count * weights[answer] / total >= 5]
    observed = np.array([counts.get(answer, 0) for answer in frequent] + [0.0])
    expected = np.array([count * weights[answer] / total for answer in frequent] + [0.0])
    observed[-1], expected[-1] = count - observed.sum(), count - expected.sum()
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    degrees = len(frequent)
    assert degrees > 10
    assert chi_square < degrees + 4.0 * np.sqrt(2 * degrees)


def _matches(pattern: str, answer: tuple[int, ...]) -> bool:
    try:
        return re.fullmatch(pattern, b"".join(TEXTS[token] for token in answer).decode()) is not None
    except UnicodeDecodeError:
        return False


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
    constraint, config = make_constraint("[abd]+"), GenerationConfig(max_new_tokens=9)
    [expected] = generate(blocks, [[1]], config, constraints=[constraint])
    clock = itertools.count()
    monkeypatch.setattr(decoder_module, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))

    def constrain_slowly(logits: LogitRows, predictions: Any) -> Any:
        results = constrain_predictions(logits, predictions)
        for request in logits.requests:
            request.constraint_seconds = 2.5 if request.span_cursors else 0.0  # and each step takes a second
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


@pytest.mark.parametrize(
    ("pattern", "tokens", "message"),
    [
        ("[abd]{40}", 9, "prompt 0: the constraint needs at least 20 tokens, and there are 9"),
        ("x", 9, "prompt 0: no tokens of the vocabulary are a text that the constraint allows"),
        ("a|b", 2, "prompt 0: no text of exactly 2 tokens fits the constraint"),
    ],
)
def test_what_cannot_be_met_is_refused(model: Transformer, pattern: str, tokens: int, message: str) -> None:
    config = GenerationConfig(max_new_tokens=tokens, stop_token_ids=())
    with pytest.raises(ValueError, match=message):
        generate(model, [[1]], config, constraints=[make_constraint(pattern)])


def test_wrong_numbers_of_constraints(model: Transformer) -> None:
    with pytest.raises(ValueError, match="constraints: 2 for 1 requests"):
        generate(model, [[1]], GenerationConfig(), constraints=[None, None])
    with pytest.raises(ValueError, match="canvas 0: 1 constraints for 2 masked spans"):
        infill(model, [[1, MASK, 2, MASK]], GenerationConfig(), constraints=[[None]])
    with pytest.raises(ValueError, match="canvas 0: masked span 2: no text of exactly 1 tokens"):
        infill(model, [[1, MASK, 2, MASK]], GenerationConfig(), constraints=[[None, make_constraint("ad|")]])


def test_spans_beside_each_other(blocks: Transformer) -> None:
    canvas, constraints = [1, *[MASK] * 5, 2], [make_constraint("[ab]+"), make_constraint("c+")]
    options = RequestOptions(is_infill=True, constraints=constraints, span_lengths=(3, 2))
    [result] = decode(blocks, [prepare_request(settings_of(blocks), canvas, options=options)])
    assert re.fullmatch("[ab]+", to_text(result.token_ids[1:4]))
    assert to_text(result.token_ids[4:6]) == "cc"
    with pytest.raises(ValueError, match="canvas 0: 2 constraints for 1 masked spans"):
        prepare_request(settings_of(blocks), canvas, options=replace(options, span_lengths=()))


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
