"""``/v1/infill`` over a socket: marginals and choices of one forward, and drafts to edit."""

from __future__ import annotations

import math
from typing import Any

import pytest

from config.generation import GenerationConfig
from diffusionlm.inference.constraints.compiler import ConstraintCompiler
from diffusionlm.inference.generate import infill
from diffusionlm.inference.requests import RequestOptions
from tests.unit.serving.http.conftest import RunningServer

SEGMENTS = ["the cat ", 1, " on the", 2, "."]


@pytest.mark.parametrize("pattern", [None, "s.*|a[a-z ]+"])
def test_a_read_is_that_of_infill(server: RunningServer, pattern: str | None) -> None:
    """Choices with the space that healing takes back before the first span; without healing where there is a
    constraint."""
    tokenizer, mask = server.tokenizer, server.tokenizer.mask_token_id
    assert mask is not None
    prefix = " " if pattern is None else ""
    words = [word for word in ("sat", "at", "mat", "on", "the", "dog") if len(tokenizer.encode(prefix + word)) == 1]
    choices: list[Any] = [words, [" mat"]]
    assert len(words) > 1
    lengths = [1, len(tokenizer.encode(" mat"))]
    segments = ["the cat ", lengths[0], " on the", lengths[1], "."]
    structured = None if pattern is None else [{"regex": pattern}, None]
    body = {"segments": segments, "read": True, "choices": choices, "structured_outputs": structured, "logprobs": 3}
    status, _, answer = server.request("POST", "/v1/infill", body)
    assert status == 200, answer
    [choice] = answer["choices"]
    start = tokenizer.encode("the cat" if pattern is None else "the cat ")
    canvas = [*start, *[mask] * lengths[0], *tokenizer.encode(" on the"), *[mask] * lengths[1], *tokenizer.encode(".")]
    positions = [len(start), len(start) + lengths[0] + len(tokenizer.encode(" on the"))]
    encoded = {positions[0]: [tokenizer.encode(prefix + text) for text in choices[0]],
               positions[1]: [tokenizer.encode(" mat")]}  # fmt: skip
    options = RequestOptions(is_read=True, choices=encoded, num_top_logprobs=3)
    constraint = None if pattern is None else ConstraintCompiler(tokenizer).compile_regex(pattern)
    texts_of_ids = {token: tokenizer.token_bytes(token) for token in tokenizer.vocab.values()}
    longer = [token for token, text in texts_of_ids.items() if text.startswith(b" ") and len(text) > 1]
    allowed = [{len(start): longer}] if pattern is None else None
    [expected] = infill(server.model, [canvas], GenerationConfig(), allowed_token_ids=allowed,
                        constraints=[[constraint, None]], options=options)  # fmt: skip
    for entries, scores, texts in zip(choice["choices"], expected.choice_logprobs, choices, strict=True):
        total = sum(map(math.exp, scores))
        for entry, score, text in zip(entries, scores, texts, strict=True):
            assert entry["text"] == text
            assert entry["logprob"] == (-9999.0 if score == -math.inf else pytest.approx(score, abs=1e-4))
            assert entry["probability"] == pytest.approx(math.exp(score) / total, abs=1e-5)
    assert pattern is None or any(entry["probability"] == 0.0 for entry in choice["choices"][0])
    content = choice["logprobs"]["content"]
    assert choice["num_forwards"] == 1 and len(content) == sum(lengths)
    for entry, logprob, top in zip(content, expected.logprobs, expected.top_logprobs, strict=True):
        assert entry["logprob"] == pytest.approx(logprob, abs=1e-4)
        values = [alternative["logprob"] for alternative in entry["top_logprobs"]]
        assert values == pytest.approx([value for _, value in top], abs=1e-4)
    assert "".join(choice["holes"]) == "".join(entry["token"] for entry in content)


def test_alternatives_by_default_and_no_choices(server: RunningServer) -> None:
    _, _, answer = server.request("POST", "/v1/infill", {"segments": SEGMENTS, "read": True})
    [choice] = answer["choices"]
    assert [len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]] == [5] * 3
    assert "choices" not in choice


def test_drafts(server: RunningServer) -> None:
    """With all drafted tokens masked again it is the answer of masks; else the others stay."""
    draft, seed = " sat on the mat", {"seed": 3, "temperature": 1.0, "logprobs": 0}
    length = len(server.tokenizer.encode(draft))
    masks = {"segments": ["the cat ", 2, " and", length, "."], **seed}
    body = {"segments": ["the cat ", 2, " and", {"draft": draft}, "."], "remask": 1, **seed}
    expected, answer = (server.request("POST", "/v1/infill", values)[2]["choices"][0] for values in (masks, body))
    assert answer["holes"] == expected["holes"] and answer["logprobs"] == expected["logprobs"]
    _, _, answer = server.request("POST", "/v1/infill", {**body, "remask": 0.5, "n": 4})
    answers = {choice["holes"][1] for choice in answer["choices"]}
    assert len(answers) > 1
    for choice in answer["choices"]:
        entries = choice["logprobs"]["content"][2:]
        kept = [entry for entry in entries if entry["logprob"] is None]
        assert len(kept) == length - int(0.5 * length + 0.5) and all(entry["token"] in draft for entry in kept)
        assert choice["text"] == "".join(("the cat ", choice["holes"][0], " and", choice["holes"][1], "."))
    events = server.events("/v1/infill", {**body, "remask": 0.5})
    assert "".join(event["choices"][0]["text"] for event in events[:-1] if event["choices"][0]["hole"] == 1) in answers
    status, _, answer = server.request("POST", "/v1/infill", {**body, "remask": 0, "remasking_strategy": "p2"})
    assert status == 200, answer
