"""Fields and endpoints of vLLM, through the `openai` client where it has a method: what they mean is computed another
way."""

from __future__ import annotations

import logging
import re
from importlib.metadata import version
from typing import Any

import openai
import pytest

from config.generation import GenerationConfig
from diffusionlm.inference.request_builder import RequestBuilder
from tests.unit.serving.http.conftest import NAME, RunningServer, StartServer
from tokenizer import CHAT_TEMPLATES, encode_chat

PROMPT = "the cat sat on"


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> RunningServer:
    """With the model's stop token."""
    return start_server(generation=GenerationConfig())


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    own: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "max_tokens": 10, "temperature": 1.0, "seed": 7}
    names = ("logit_bias", "stop", "presence_penalty", "frequency_penalty", "logprobs", "user", "max_tokens")
    own |= {key: fields.pop(key) for key in names if key in fields}
    extra = {"token_healing": False, "return_token_ids": True, **fields}
    return client.completions.create(**own, extra_body=extra).choices[0]


def stream(server: RunningServer, **fields: Any) -> list[dict[str, Any]]:
    """Choices of the chunks. The client takes no finish reason of null, which OpenAI's chunks of completions have."""
    body = {"prompt": PROMPT, "max_tokens": 10, "temperature": 1.0, "seed": 7, "token_healing": False, **fields}
    return [chunk["choices"][0] for chunk in server.events("/v1/completions", body)[:-1]]


def test_end_of_text_and_special_tokens(client: openai.OpenAI, server: RunningServer) -> None:
    tokenizer = server.tokenizer
    assert tokenizer.eos_token is not None
    fields: dict[str, Any] = {"logit_bias": {str(tokenizer.eos_token_id): 100}}
    assert complete(client, **fields).text == ""
    early = complete(client, min_tokens=3, **fields)
    assert len(early.token_ids) == 3 and tokenizer.eos_token_id not in early.token_ids
    assert complete(client, ignore_eos=True, **fields).text == tokenizer.eos_token * 10
    fields = {"ignore_eos": True, "logit_bias": {str(tokenizer.eos_token_id): 4}, "seed": 2, "logprobs": 2}
    shown, hidden = (complete(client, **fields, skip_special_tokens=skips) for skips in (False, True))
    assert 0 < shown.text.count(tokenizer.eos_token) < 10 and shown.token_ids == hidden.token_ids
    assert hidden.text == shown.text.replace(tokenizer.eos_token, "") == "".join(hidden.logprobs.tokens)
    chunks = stream(server, **fields, skip_special_tokens=True, diffusing=True)
    assert "".join(chunk["text"] for chunk in chunks) == hidden.text == "".join(chunks[-1]["canvas"])


def test_stop_strings(client: openai.OpenAI, server: RunningServer) -> None:
    """They may be a part of the text, and count from a number of tokens on."""
    fields: dict[str, Any] = {"ignore_eos": True, "logprobs": 1}
    whole = complete(client, **fields)
    stop = whole.text[6:8]
    ends = [match.end() for match in re.finditer(re.escape(stop), whole.text)]
    cut = complete(client, **fields, stop=stop, include_stop_str_in_output=True)
    assert cut.text == whole.text[: ends[0]] == "".join(cut.logprobs.tokens) and cut.finish_reason == "stop"
    chunks = stream(server, **fields, stop=stop, include_stop_str_in_output=True)
    assert "".join(chunk["text"] for chunk in chunks) == cut.text
    assert complete(client, **fields, stop=stop).text == cut.text.removesuffix(stop)
    num_needed = len(cut.token_ids)
    for count in (num_needed - 1, num_needed):
        answer = complete(client, **fields, stop=stop, min_tokens=count)
        assert (answer.text == cut.text.removesuffix(stop)) == (count < num_needed), count
        assert len(answer.token_ids) >= count


@pytest.mark.parametrize(
    ("kind", "value", "same"),
    [("regex", "(t[aeo]t){2}", None), ("choice", ["on the mat.", "flat"], None),
     ("json", '{"enum": ["a", "b"]}', {"enum": ["a", "b"]})],
)  # fmt: skip
def test_guided_answers(client: openai.OpenAI, kind: str, value: Any, same: Any) -> None:
    forms: Any = ({f"guided_{kind}": value}, {"structured_outputs": {kind: same or value}})
    answers = [complete(client, max_tokens=16, **fields) for fields in forms]
    assert answers[0].token_ids == answers[1].token_ids and answers[0].finish_reason == "stop"


def test_ids_of_requests(client: openai.OpenAI) -> None:
    answer = client.completions.with_raw_response.create(
        model=NAME, prompt=PROMPT, max_tokens=1, extra_body={"request_id": "mine-1"}
    )
    assert answer.headers["x-request-id"] == "mine-1" and answer.parse().id == "cmpl-mine-1"


def test_unknown_fields_can_be_ignored(start_server: StartServer, caplog: pytest.LogCaptureFixture) -> None:
    """Also within a message, and a field that is not supported; what is wrong is still refused. Each is logged once."""
    server = start_server(unknown_fields="ignore")
    messages = [{"role": "user", "content": "a", "mood": "good"}, {"role": "user", "content": "b", "mood": "bad"}]
    body = {"messages": messages, "max_tokens": 3, "seed": 1, "truncate_prompt_tokens": 5, "new\n": {"a": [1]}}
    plain = {key: body[key] for key in ("max_tokens", "seed")}
    plain["messages"] = [{"role": "user", "content": text} for text in "ab"]
    with caplog.at_level(logging.WARNING, "diffusionlm"):
        answers = [server.request("POST", "/v1/chat/completions", item)[2]["choices"] for item in (body, body, plain)]
    assert answers[0] == answers[1] == answers[2]
    names = [record.getMessage().split()[2] for record in caplog.records]
    assert sorted(names) == ["'messages.mood'", "'new\\n'", "'truncate_prompt_tokens'"]
    for wrong in ({"top_p": 7}, {"messages": [{"role": "user"}]}):
        assert server.request("POST", "/v1/chat/completions", {**body, **wrong})[0] == 400
    assert server.request("POST", "/tokenize", {"prompt": "a", "unknown": 1})[0] == 200


def test_tokens_of_texts(server: RunningServer) -> None:
    tokenizer = server.tokenizer
    body = {"model": NAME, "prompt": PROMPT + " é", "return_token_strs": True}
    status, _, answer = server.request("POST", "/tokenize", body)
    ids = tokenizer.encode(PROMPT + " é")
    assert (status, answer["count"], answer["tokens"], answer["max_model_len"]) == (200, len(ids), ids, 256)
    assert "".join(answer["token_strs"]) == PROMPT + " é"
    messages = [{"role": "user", "content": "the cat?"}]
    chat = server.request("POST", "/tokenize", {"messages": messages, "add_special_tokens": False})[2]
    expected = encode_chat(tokenizer, CHAT_TEMPLATES["chatml"], messages, add_generation_prompt=True)
    assert chat["tokens"] == expected and chat["token_strs"] is None
    assert server.request("POST", "/detokenize", {"tokens": expected})[2] == {"prompt": tokenizer.decode(expected)}
    assert server.request("GET", "/version")[2] == {"version": version("diffusionlm")}
    for path, wrong, param in (
        ("/tokenize", {"prompt": ["a", "b"]}, "prompt"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"messages": messages, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
    ):
        status, _, refused = server.request("POST", path, wrong)
        assert (status, refused["error"]["param"]) == (400, param), refused


def test_tokens_before_every_text(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start_server()
    monkeypatch.setattr(RequestBuilder, "prefix_ids", (7,))
    ids = server.tokenizer.encode("the cat")
    for adds, expected in ((None, [7, *ids]), (True, [7, *ids]), (False, ids)):
        body = {"prompt": "the cat", "add_special_tokens": adds}
        assert server.request("POST", "/tokenize", body)[2]["tokens"] == expected
