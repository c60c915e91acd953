"""Reads: the exact marginals of one forward, compared with a plain forward of the model and with enumeration."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from config.generation import GenerationConfig
from diffusionlm.inference.constraints.byte_automaton import compile_expression
from diffusionlm.inference.constraints.compiler import TokenConstraint
from diffusionlm.inference.constraints.expressions import parse_regex
from diffusionlm.inference.constraints.token_automaton import TokenTrie
from diffusionlm.inference.generate import Generation, generate, infill
from diffusionlm.inference.requests import RequestOptions
from diffusionlm.models.patterns import AttentionPattern, Bidirectional, BlockCausal
from diffusionlm.models.transformer import Transformer
from diffusionlm.serving.engine import Engine
from tests.decoding_jobs import assert_same
from tests.unit.inference.conftest import MakeLike

MASK, V = 22, 23
CANVAS = [1, MASK, MASK, 4, 2, 7, 7, MASK, 9, 3, 5, MASK, MASK, MASK, 8, 8, 2, MASK, 6]
MASKS = [index for index, token in enumerate(CANVAS) if token == MASK]
CHOICES = {1: [[3, 4], [4, 4], [0, 20]], 11: [[1, 2, 3], [4, 5, 6]]}
READ = RequestOptions(is_read=True, num_top_logprobs=20, choices=CHOICES, logit_bias={3: 1.5})


def marginals(model: Transformer, pattern: AttentionPattern, canvas: list[int], forbidden: tuple[int, ...]) -> Any:
    """Log-probabilities of all positions, by a plain forward."""
    logits_LV = model(torch.tensor([canvas]), pattern=pattern)[0].detach()
    if model.config.logit_alignment == "shifted":
        logits_LV = logits_LV.roll(1, 0)
    logits_LV[:, 3] += 1.5
    logits_LV[:, list(forbidden)] = -torch.inf
    return logits_LV.log_softmax(-1).numpy()


def check(read: Generation, logprobs_LV: NDArray[np.float64]) -> None:
    assert read.num_forwards == 1 and read.finish_reason == "length"
    for index, position in enumerate(MASKS):
        expected_V = logprobs_LV[position]
        best = np.argsort(-expected_V, kind="stable")[:20]
        assert [token for token, _ in read.top_logprobs[index]] == best.tolist()
        np.testing.assert_allclose([value for _, value in read.top_logprobs[index]], expected_V[best], atol=1e-9)
        assert read.token_ids[position] == best[0] and read.logprobs[index] == pytest.approx(expected_V[best[0]])
    for scores, (start, choices) in zip(read.choice_logprobs, CHOICES.items(), strict=True):
        expected = [sum(logprobs_LV[start + i, token] for i, token in enumerate(choice)) for choice in choices]
        np.testing.assert_allclose(scores, expected, atol=1e-9)


@pytest.mark.parametrize("kind", ["bidirectional", "dual", "blocks", "shifted", "no cache", "turns"])
def test_marginals_are_those_of_a_plain_forward(model: Transformer, like: MakeLike, kind: str) -> None:
    """Also where masks are in several blocks, which decoding would fill one after the other."""
    config, pattern = GenerationConfig(suppress_token_ids=(5,)), BlockCausal(4)
    options = READ
    match kind:
        case "bidirectional" | "dual":
            keys: dict[str, Any] = {"cache": "dual"} if kind == "dual" else {"canvas": "growing", "temperature": 1.0}
            config, pattern = config.model_copy(update={"block_length": 2, **keys}), Bidirectional()  # type: ignore[assignment]
        case "shifted":
            model = like(block_length=4, logit_alignment="shifted")
        case "turns":
            model = like(block_length=4)
            options = replace(READ, segment_starts=(6,))
            segments = torch.tensor([[0] * 6 + [1] * (len(CANVAS) - 6)])
            pattern = BlockCausal(4, segments_BL=segments)
        case _:
            model = like(block_length=4)
            config = config.model_copy(update={"cache": "none"} if kind == "no cache" else {"denoising_steps": 3})
    [read] = infill(model, [CANVAS], config, options=options)
    check(read, marginals(model, pattern, CANVAS, (5, MASK)))


@pytest.mark.parametrize("name", ["blocks", "shifted_blocks"])
def test_reads_beside_others_in_an_engine(name: str, request: pytest.FixtureRequest) -> None:
    """Long texts are read in parts, beginnings shared, and nothing of a read stays in the cache."""
    blocks: Transformer = request.getfixturevalue(name)
    config, prompt = GenerationConfig(max_new_tokens=6), [*CANVAS[3:7], *CANVAS[3:7], 9]
    canvas, options = (
        [*prompt, 4, 2, 7, *CANVAS[1:]],
        replace(READ, is_infill=True, choices={}),
    )  # masks from a block on
    [expected] = infill(blocks, [canvas], config, options=options)
    [answer] = generate(blocks, [prompt], config)
    with Engine(blocks, max_num_batched_tokens=5, cache_memory=1 << 20, page_size=4) as engine:
        handles = [engine.submit(canvas, config, options=options), engine.submit(prompt, config)]
        handles[0].result(60)
        handles += [engine.submit(canvas, config, options=options), engine.submit(prompt, config)]
        reads, answers = [[handle.result(60) for handle in handles[first::2]] for first in (0, 1)]
        assert engine.status.num_owned_pages == 0 and engine.status.counts.num_prefix_hits > 0
    for read, other in zip(reads, answers, strict=True):
        assert_same(other, answer)
        assert read.token_ids == expected.token_ids and read.num_forwards == 1
        for top, expected_top in zip(read.top_logprobs, expected.top_logprobs, strict=True):
            np.testing.assert_allclose(np.array(top), np.array(expected_top), atol=1e-9)


TEXTS = [b"a", b"b", b"ab", b"ba", b"c"]


@pytest.mark.parametrize("pattern", ["a*b*c", "(ab|c)+", "[abc]{4}"])
def test_marginals_and_choices_under_a_constraint(model: Transformer, blocks: Transformer, pattern: str) -> None:
    """Against all strings that the constraint accepts; the two spans are independent."""
    canvas = [1, MASK, MASK, MASK, 2, MASK, 6]
    constraint = TokenConstraint(compile_expression(parse_regex(pattern)), TokenTrie.from_texts(range(5), TEXTS, V))
    strings = product(range(len(TEXTS)), repeat=3)
    sequences = [item for item in strings if re.fullmatch(pattern.encode(), b"".join(TEXTS[token] for token in item))]
    choices = [list(sequences[0]), list(sequences[-1]), [9, 9, 9], [2, 2, 2]]
    options = RequestOptions(
        is_read=True, num_top_logprobs=20, choices={1: choices, 5: [[4], [7]]}, logit_bias={3: 1.5}
    )
    for network, attention in ((model, Bidirectional()), (blocks, BlockCausal(4))):
        [read] = infill(network, [canvas], GenerationConfig(), constraints=[[constraint, None]], options=options)
        logprobs_LV = marginals(network, attention, canvas, (MASK,))
        weights = np.exp([sum(logprobs_LV[1 + i, token] for i, token in enumerate(item)) for item in sequences])
        for index in range(3):
            expected_V = np.zeros(V)
            for item, weight in zip(sequences, weights / weights.sum(), strict=True):
                expected_V[item[index]] += weight
            top = dict(read.top_logprobs[index])
            assert set(top) == set(np.flatnonzero(expected_V).tolist())
            np.testing.assert_allclose([np.exp(value) for value in top.values()], expected_V[[*top]], atol=1e-12)
        assert read.token_ids[1:4] == sequences[int(weights.argmax())]
        expected = [weights[sequences.index(tuple(item))] / weights.sum() if tuple(item) in sequences else 0.0
                    for item in choices]  # fmt: skip
        np.testing.assert_allclose(np.exp(read.choice_logprobs[0]), expected, atol=1e-12)
        np.testing.assert_allclose(read.choice_logprobs[1], logprobs_LV[5, [4, 7]], atol=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"is_read": False}, "choices need is_read"),
        ({"choices": {1: [[1]]}}, "canvas 0: choices of position 1 must have 2 tokens each"),
        ({"choices": {2: [[1]]}}, "choices of position 2 must have 0 tokens each"),
        ({"choices": {7: [[99]]}}, "choices: token 99 is outside the model's vocabulary"),
    ],
)
def test_wrong_reads_are_refused(model: Transformer, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        infill(model, [CANVAS], GenerationConfig(), options=replace(READ, **options))
