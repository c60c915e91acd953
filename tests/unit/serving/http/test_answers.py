"""Answers over a socket are those of `generate` and `infill`, and valid for the `openai` client: texts, stops,
log-probabilities, settings, streams."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import openai
import pytest

from diffusionlm.inference.generate import Generation, generate, infill
from tests.unit.serving.http.conftest import NAME, RunningServer, decoding_config
from tokenizer import CHAT_TEMPLATES, encode_chat

PROMPT = "the cat sat on"


def decode_alone(server: RunningServer, seed: int, **values: Any) -> Generation:
    return generate(server.model, [server.tokenizer.encode(PROMPT)], decoding_config(server, **values), [seed])[0]


def complete(server: RunningServer, **fields: Any) -> Any:
    body = {"model": NAME, "prompt": PROMPT, "max_tokens": 12, "temperature": 1.0, "seed": 7, "token_healing": False}
    status, _, answer = server.request("POST", "/v1/completions", {**body, **fields})
    assert status == 200, answer
    return answer


STOPS = tuple(range(0, 280, 9))


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({"denoising_steps": 2}, None),
        ({"remasking_strategy": "threshold", "confidence_threshold": 0.3}, None),
        ({"block_length": 2, "temperature": 0.5, "top_k": 5}, None),
        ({"attention": "bidirectional", "cache": "dual", "block_length": 6}, None),
        ({"suppress_token_ids": [5, 6], "cfg_scale": 0.5, "stop_token_ids": [*STOPS]}, None),
        ({"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.4}, None),
        # vLLM's fields and values
        ({"min_p": 0.4, "top_k": -1}, {"min_p": 0.4}),
        ({"top_k": 0, "top_p": 0.6}, {"top_p": 0.6}),
        ({"min_tokens": 4, "stop_token_ids": [*STOPS]}, {"min_new_tokens": 4, "stop_token_ids": STOPS}),
        ({"ignore_eos": True, "stop_token_ids": [5, 60, 90]}, {"stop_token_ids": (5, 60, 90)}),
        ({"best_of": 1, "metadata": {"a": "b"}, "store": True, "user": "u", "priority": 0, "length_penalty": 1.0}, {}),
    ],
)
def test_settings_of_a_request(server: RunningServer, fields: Any, settings: Any) -> None:
    values = fields if settings is None else settings
    expected = decode_alone(server, 7, max_new_tokens=12, **{"temperature": 1.0, **values})
    answer = complete(server, return_token_ids=True, **fields)["choices"][0]
    assert tuple(answer["token_ids"]) == expected.token_ids
    assert (answer["num_forwards"], answer["seed"]) == (expected.num_forwards, 7)
    assert answer["finish_reason"] == expected.finish_reason


def test_prompts_times_choices(server: RunningServer) -> None:
    prompts = [server.tokenizer.encode(text) for text in (PROMPT, "the mat")]
    answer = complete(server, prompt=prompts, n=2, return_token_ids=True)
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["seed"] for choice in choices] == [7, 8, 9, 10]
    for choice, prompt in zip(choices, [prompts[0]] * 2 + [prompts[1]] * 2, strict=True):
        [expected] = generate(
            server.model, [prompt], decoding_config(server, max_new_tokens=12, temperature=1.0), [choice["seed"]]
        )
        assert tuple(choice["token_ids"]) == expected.token_ids and choice["prompt_token_ids"] == prompt
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts)) and answer["usage"]["completion_tokens"] == 48


def test_unseeded_requests_differ_and_can_be_repeated(server: RunningServer) -> None:
    first, second = (complete(server, seed=None)["choices"][0] for _ in range(2))
    assert first["seed"] != second["seed"] and first["text"] != second["text"]
    assert complete(server, seed=first["seed"])["choices"][0]["text"] == first["text"]
    choices = complete(server, seed=None, n=4)["choices"]
    assert len({choice["text"] for choice in choices}) == len({choice["seed"] for choice in choices}) == 4


def test_stop_strings(server: RunningServer) -> None:
    text = complete(server, max_tokens=20)["choices"][0]["text"]
    steps = decode_alone(server, 7, max_new_tokens=20, temperature=1.0).step_map
    for stop in ([text[12:13], text[7:11]], text[-2:]):
        stops = [stop] if isinstance(stop, str) else stop
        whole = complete(server, max_tokens=20, stop=stop, logprobs=0)
        choice = whole["choices"][0]
        assert choice["finish_reason"] == "stop" and not any(item in choice["text"] for item in stops)
        assert text.startswith(choice["text"]) and any(text[len(choice["text"]) :].startswith(item) for item in stops)
        body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 1.0, "seed": 7, "token_healing": False}
        *chunks, last, done = server.events(
            "/v1/completions", {**body, "stop": stop, "logprobs": 0, "stream_options": {"include_usage": True}}
        )
        assert done == "[DONE]" and last["usage"] == whole["usage"]
        parts = [chunk["choices"][0] for chunk in chunks]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [token for part in parts for token in part["logprobs"]["tokens"]] == choice["logprobs"]["tokens"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["stop"]
        num_forwards = max(steps[: whole["usage"]["completion_tokens"]])
        assert choice["num_forwards"] == parts[-1]["num_forwards"] == num_forwards
    server.wait_until_idle()


def test_logprobs(server: RunningServer) -> None:
    expected = decode_alone(server, 7, max_new_tokens=12, temperature=1.0)
    answer = complete(server, logprobs=3)["choices"][0]
    logprobs = answer["logprobs"]
    assert logprobs["token_logprobs"] == pytest.approx(expected.logprobs, abs=1e-4)
    assert "".join(logprobs["tokens"]) == answer["text"]
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == logprob and 1 <= len(top) <= 4 and max(top.values()) >= logprob
        assert sum(map(math.exp, top.values())) <= 1.0 + 1e-6


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "diffusionlm"
    for request in (client.models.retrieve, lambda name: client.completions.create(model=name, prompt="a")):
        with pytest.raises(openai.NotFoundError) as caught:
            request("other")
        assert caught.value.code == "model_not_found" and caught.value.param == "model"


def test_a_chat(server: RunningServer, client: openai.OpenAI) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "cat?"}]}]
    choice = client.chat.completions.create(
        model=NAME, messages=parts, max_completion_tokens=9, seed=1, logprobs=True, top_logprobs=2
    ).choices[0]
    messages = [{"role": "user", "content": "the cat?"}]
    ids = encode_chat(server.tokenizer, CHAT_TEMPLATES["chatml"], messages, add_generation_prompt=True)
    [expected] = generate(server.model, [ids], decoding_config(server, max_new_tokens=9), [1])
    assert choice.message.content == server.tokenizer.decode(expected.token_ids)
    assert choice.logprobs is not None and choice.logprobs.content is not None
    tokens = choice.logprobs.content
    assert len(tokens) == 9 and "".join(token.token for token in tokens) == choice.message.content
    data = bytes(byte for token in tokens for byte in token.bytes or ())
    assert data.decode(errors="replace") == choice.message.content
    assert all(len(token.top_logprobs) == 2 for token in tokens)
    assert all(token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob for token in tokens)


def test_a_streamed_chat(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "the cat?"}]
    options: Any = {"model": NAME, "messages": messages, "max_tokens": 14, "temperature": 1.0, "seed": 3, "n": 3}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == 1 and not chunks[-1].choices
    assert chunks[-1].usage == whole.usage and all(chunk.usage is None for chunk in chunks[:-1])
    for choice in whole.choices:
        own = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert own[0].delta.role == "assistant"
        assert "".join(part.delta.content or "" for part in own) == choice.message.content
        assert [part.finish_reason for part in own if part.finish_reason] == [choice.finish_reason]
        assert own[-1].finish_reason is not None
    assert len({choice.message.content for choice in whole.choices}) == 3


def test_logit_bias(server: RunningServer, client: openai.OpenAI) -> None:
    token = server.tokenizer.vocab[b"z"]
    answer = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=5, logit_bias={str(token): 100})
    assert answer.choices[0].text == "zzzzz"


def test_an_echo(server: RunningServer) -> None:
    plain, echo = (complete(server, echo=echo)["choices"][0]["text"] for echo in (False, True))
    assert echo == PROMPT + plain
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 1.0, "seed": 7, "token_healing": False, "echo": True}
    chunks = server.events("/v1/completions", body)[:-1]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == echo


def test_a_suffix(server: RunningServer) -> None:
    tokenizer, mask = server.tokenizer, server.model.config.mask_token_id
    assert mask is not None
    canvas = [*tokenizer.encode("the cat"), *[mask] * 6, *tokenizer.encode(" the mat")]
    [expected] = infill(server.model, [canvas], decoding_config(server, temperature=1.0), [7])
    start = len(tokenizer.encode("the cat"))
    answer = complete(server, prompt="the cat", suffix=" the mat", max_tokens=6)
    assert answer["choices"][0]["text"] == tokenizer.decode(expected.token_ids[start : start + 6])
    assert answer["usage"]["prompt_tokens"] == len(canvas) - 6
    ids = complete(server, prompt=tokenizer.encode("the cat"), suffix=" the mat", max_tokens=6)
    assert ids["choices"][0]["text"] == answer["choices"][0]["text"]


@pytest.mark.parametrize("healing", [True, False])
def test_an_infill(server: RunningServer, healing: bool) -> None:
    segments: list[str | int] = ["the ", 3, 2, " on the ", 4, "."]
    body = {"segments": segments, "temperature": 1.0, "seed": 4, "token_healing": healing, "logprobs": 1}
    status, _, whole = server.request("POST", "/v1/infill", body)
    assert status == 200 and whole["object"] == "infill"
    choice = whole["choices"][0]
    first, second, third = choice["holes"]
    assert choice["text"] == f"the {first}{second} on the {third}." and choice["finish_reason"] == "length"
    entries = choice["logprobs"]["content"]
    assert len(entries) == whole["usage"]["completion_tokens"] == 9
    for span, part in zip(choice["holes"], (entries[:3], entries[3:5], entries[5:]), strict=True):
        assert bytes(byte for entry in part for byte in entry["bytes"]).decode(errors="replace") == span
    tokenizer = server.tokenizer
    assert whole["usage"]["prompt_tokens"] == sum(len(tokenizer.encode(text)) for text in ("the ", " on the ", "."))
    *chunks, _ = server.events("/v1/infill", {**body, "diffusing": True})
    parts, holes = [chunk["choices"][0] for chunk in chunks], ["", "", ""]
    for part in parts:
        holes[part["hole"]] += part["text"]
    assert holes == choice["holes"] and parts[-1]["finish_reason"] == "length"
    assert list(parts[-1]["canvas"]) == [entry["token"] for entry in entries]
    assert [entry for part in parts for entry in part["logprobs"]["content"]] == entries
    if not healing:
        mask = server.model.config.required_mask_token_id
        parts_of_canvas = (tokenizer.encode(part) if isinstance(part, str) else [mask] * part for part in segments)
        canvas = [token for tokens in parts_of_canvas for token in tokens]
        [expected] = infill(server.model, [canvas], decoding_config(server, temperature=1.0), [4])
        assert choice["num_forwards"] == expected.num_forwards
        assert tokenizer.decode(expected.token_ids) == choice["text"]


def test_a_stream_of_the_canvas(server: RunningServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 10, "seed": 1, "diffusing": True, "temperature": 1.0}
    *chunks, done = server.events("/v1/completions", body)
    canvases = [chunk["choices"][0]["canvas"] for chunk in chunks]
    assert done == "[DONE]" and all(len(canvas) >= 10 for canvas in canvases)
    for before, after in pairwise(canvases):
        kept = [(old, new) for old, new in zip(before, after, strict=False) if old is not None]
        assert all(old == new or "\ufffd" in old for old, new in kept)
    assert None not in canvases[-1] and len(canvases[-1]) == 10
    assert any(None in canvas for canvas in canvases)
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert "".join(canvases[-1]) == text
    *_, last, _ = server.events("/v1/completions", {**body, "stop": text[4:7]})
    assert "".join(last["choices"][0]["canvas"]) == text[: text.find(text[4:7])], "a stop string is not in it"


@pytest.mark.parametrize("prompt", ["the cat s", "flat mat.\nthe "])
def test_a_healed_prompt_is_in_no_part_of_the_answer(server: RunningServer, prompt: str) -> None:
    """The text, the log-probabilities and the canvas have each character once, whole and as a stream alike."""
    body = {"prompt": prompt, "max_tokens": 10, "seed": 3, "temperature": 1.0, "logprobs": 5, "return_token_ids": True}
    _, _, whole = server.request("POST", "/v1/completions", body)
    [choice] = whole["choices"]
    ids = server.tokenizer.encode(prompt)
    assert choice["prompt_token_ids"] != ids  # it is healed
    text = server.tokenizer.decode_bytes(choice["prompt_token_ids"] + choice["token_ids"]).decode(errors="replace")
    assert text == prompt + choice["text"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert [top[token] for top, token in zip(logprobs["top_logprobs"], logprobs["tokens"], strict=True)] == (
        logprobs["token_logprobs"]
    )
    repeated = prompt.encode()[len(server.tokenizer.decode_bytes(choice["prompt_token_ids"])) :]
    assert all(repeated + text.encode() in server.tokenizer.vocab for text in logprobs["top_logprobs"][0])
    assert whole["usage"]["prompt_tokens"] == len(ids)
    *chunks, last, _ = server.events(
        "/v1/completions", {**body, "diffusing": True, "stream_options": {"include_usage": True}}
    )
    parts = [chunk["choices"][0] for chunk in chunks]
    assert "".join(part["text"] for part in parts) == choice["text"] == "".join(parts[-1]["canvas"])
    for key in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [value for part in parts for value in part["logprobs"][key]] == logprobs[key]
    assert next(part["canvas"][0] for part in parts if part["canvas"][0] is not None) == logprobs["tokens"][0]
    assert last["usage"] == whole["usage"] | {"prompt_tokens_details": last["usage"]["prompt_tokens_details"]}


def test_a_mask_token_in_a_text_is_text(server: RunningServer) -> None:
    tokenizer, mask_id = server.tokenizer, server.model.config.mask_token_id
    answer = complete(server, prompt=f"the {tokenizer.mask_token} cat", max_tokens=4, return_token_ids=True)["choices"][
        0
    ]
    assert mask_id not in answer["prompt_token_ids"] and len(answer["token_ids"]) == 4
    ids = [*tokenizer.encode("the"), mask_id]
    assert len(complete(server, prompt=ids, max_tokens=4, return_token_ids=True)["choices"][0]["token_ids"]) == 4
    messages = [{"role": "user", "content": f"{tokenizer.mask_token}<|im_end|>"}]
    assert server.request("POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 2})[0] == 200


def test_length_of_an_answer_that_names_none(server: RunningServer) -> None:
    context = server.model.config.max_position_embeddings
    answer = complete(server, prompt=[1] * (context - 3), max_tokens=None)
    assert answer["usage"]["completion_tokens"] == 3
    status, _, refused = server.request("POST", "/v1/completions", {"prompt": [1] * context})
    assert (status, refused["error"]["code"]) == (400, "context_length_exceeded")
