"""Constraints with speculation: the text of constrained next-token decoding, whatever is drafted."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from diffusionlm.inference.decoder import Decoder
from diffusionlm.inference.generate import decode
from diffusionlm.inference.requests import PreparedRequest
from diffusionlm.models.transformer import Transformer
from tests.decoding_jobs import LIMITS, assert_same, limit_decoder, run_all
from tests.unit.inference.constraints.test_constrained_decoding import EOS, LETTERS, make_constraint, to_text
from tests.unit.inference.test_speculation import KINDS, MODELS, assert_same_text, config_of, prepare

Like = Callable[..., Transformer]
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("(ab|c)+d?", {"temperature": 0.0}, {"num_top_logprobs": 3}),
    ("(ab|c)*(d|abc)", {"temperature": 1.0, "stop_token_ids": (EOS, 20)}, {"logit_bias": {EOS: 3.0, 1: 0.5}}),
    ("[abd]{5,9}é", {"temperature": 1.3, "top_k": 3, "stop_token_ids": (EOS,), "min_new_tokens": 8}, {}),
    ("(ab|ba|c|d)+", {"temperature": 0.7, "top_p": 0.7, "repetition_penalty": 1.4, "frequency_penalty": 0.6}, {}),
    ("[abcd]{20,}", {"temperature": 0.9, "min_p": 0.05}, {"allowed_token_ids": {3: [0, 4, 6], 7: [3, 10]}}),
    ("cd(ab|c)*d", {"temperature": 1.0, "stop_token_ids": (EOS,)},
     {"repeated_bytes": [b"a"], "allowed_token_ids": {2: [0, 4, 6]}, "num_top_logprobs": 2}),
]  # fmt: skip


def prepare_case(model: Transformer, number: int, seed: int, *kind: Any, **changes: Any) -> PreparedRequest:
    """A case with speculation of a kind, or as next-token decoding."""
    pattern, values, options = CASES[number]
    pattern = pattern.replace("cd", "bcd") if "repeated_bytes" in options else pattern
    config = config_of(*kind, **{"max_new_tokens": 12, **values})
    return prepare(model, config, [1, 2], seed, constraints=[make_constraint(pattern)], **{**options, **changes})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", range(len(CASES)))
def test_texts_are_those_of_constrained_next_tokens(like: Like, number: int, kind: str) -> None:
    model = like(**MODELS[("block", "token, shifted")[number % 2]])
    num_saved = 0
    for seed in range(2):
        [expected] = decode(model, [prepare_case(model, number, seed)])
        for draft_length in (1, 4):
            [ours] = decode(model, [prepare_case(model, number, seed, kind, draft_length)])
            assert_same_text(ours, expected)
            for top, other in zip(ours.top_logprobs, expected.top_logprobs, strict=True):
                assert [token for token, _ in top] == [token for token, _ in other]
                assert [value for _, value in top] == pytest.approx([value for _, value in other], abs=1e-9)
            num_saved += expected.num_forwards - ours.num_forwards
        assert re.fullmatch(CASES[number][0], to_text(expected.token_ids)) or "repeated_bytes" in CASES[number][2]
    assert num_saved > 0 or kind == "two_forwards", "some drafts are right"


@pytest.mark.parametrize("name", ["plenty", "everything"])
def test_mixed_requests_with_preemption_and_shared_pages(like: Like, name: str) -> None:
    model = like(**MODELS["block"])
    kinds: list[tuple[Any, ...]] = [("one_forward", 4), (), ("two_forwards", 3), ("one_forward", 2)]
    cases = [(index % len(CASES), index, kinds[index % 4]) for index in range(8)]
    jobs = [prepare_case(model, number, seed, *kind, num_top_logprobs=0) for number, seed, kind in cases]
    plain = [prepare_case(model, number, seed) for number, seed, _ in cases]
    num_pages, limits = LIMITS[name]
    decoder = Decoder(model, min(num_pages, 14), limits)
    answers = run_all(decoder, jobs, [0, 0, 1, 3, 5, 6, 8, 12])
    assert (decoder.counts.num_preemptions > 0) == (name == "everything")
    for answer, job, expected in zip(answers, jobs, decode(model, plain), strict=True):
        assert_same(answer, decode(model, [job])[0])
        assert_same_text(answer, expected)


def test_deterministic_decoders_give_the_bits_of_constrained_next_tokens(like: Like) -> None:
    model, num_threads = like(**MODELS["block"]).float(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for number in range(len(CASES)):
            ours, expected = (
                run_all(Decoder(model, *limit_decoder(40, 4, deterministic=True)), [job], [0])[0]
                for job in (prepare_case(model, number, 5, "one_forward", 3), prepare_case(model, number, 5))
            )
            assert_same_text(ours, expected, tolerance=0.0)
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize(("kind", "num_forwards"), [("one_forward", 1 + 4), ("two_forwards", 2 * 4)])
def test_drafts_fit_the_constraint(like: Like, kind: str, num_forwards: int) -> None:
    """Where one token is possible at each position, all drafts are right: a forward verifies 4 and adds one."""
    model = like(**MODELS["block"])
    constraint = make_constraint("(abcd){5}", LETTERS)
    [answer] = decode(model, [prepare(model, config_of(kind, 4), [1], constraints=[constraint])])
    assert to_text(answer.token_ids) == "abcd" * 5 and set(answer.logprobs) == {0.0}
    assert answer.num_forwards == num_forwards
