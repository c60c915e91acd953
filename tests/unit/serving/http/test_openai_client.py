"""The `openai` client, which validates every response, gets the answers of `generate`."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from config.generation import GenerationConfig
from diffusionlm.inference.generate import generate
from diffusionlm.inference.request_builder import suppress_ids_without_text
from tests.unit.serving.http.conftest import NAME, RunningServer
from tokenizer import CHAT_TEMPLATES, encode_chat

PROMPT = "the cat sat on"


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key="none", _strict_response_validation=True, max_retries=0)


def answer(server: RunningServer, prompt_ids: list[int], seed: int, **values: Any) -> tuple[int, ...]:
    """Tokens of `generate` for a prompt without token healing."""
    config = suppress_ids_without_text(
        GenerationConfig.model_validate({"stop_token_ids": (), **values}),
        server.tokenizer,
        server.model.config.vocab_size,
    )
    return generate(server.model, [prompt_ids], config, [seed])[0].token_ids


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "diffusionlm"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"


def test_a_completion(server: RunningServer, client: openai.OpenAI) -> None:
    ids = server.tokenizer.encode(PROMPT)
    response = client.completions.create(model=NAME, prompt=ids, max_tokens=11, temperature=1.0, seed=5)
    expected = answer(server, ids, 5, max_new_tokens=11, temperature=1.0)
    [choice] = response.choices
    assert choice.text == server.tokenizer.decode(expected) and choice.finish_reason == "length"
    assert response.usage is not None
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (len(ids), 11)
    assert response.usage.total_tokens == len(ids) + 11
    assert response.id.startswith("cmpl-") and response.model == NAME


def test_a_chat(server: RunningServer, client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "the cat?"}]
    response = client.chat.completions.create(model=NAME, messages=messages, max_completion_tokens=9, seed=1)
    ids = encode_chat(server.tokenizer, CHAT_TEMPLATES["chatml"], messages, add_generation_prompt=True)
    expected = answer(server, ids, 1, max_new_tokens=9)
    assert response.choices[0].message.content == server.tokenizer.decode(expected)
    assert response.choices[0].message.role == "assistant"
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "cat?"}]}]
    same = client.chat.completions.create(model=NAME, messages=parts, max_completion_tokens=9, seed=1)
    assert same.choices[0].message.content == response.choices[0].message.content


def test_a_streamed_chat(server: RunningServer, client: openai.OpenAI) -> None:
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
