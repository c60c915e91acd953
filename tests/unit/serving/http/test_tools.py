"""Calls of tools over a socket, with the clients that people use: openai's loop, LangChain's three methods."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

import openai
import pytest
import torch
from pydantic import BaseModel, Field

from config.generation import GenerationConfig
from diffusionlm.inference.request_builder import RequestBuilder
from diffusionlm.models.transformer import Transformer
from tests.conftest import MakeModel
from tests.unit.serving.http.conftest import NAME, RunningServer, StartServer
from tokenizer import CHAT_TEMPLATES, ChatTemplate, Tokenizer, encode_chat, render_chat, train_bpe
from tokenizer.special_tokens import TokenOptions

CONTROL = ("<|endoftext|>", "<|mask|>", "<|im_start|>", "<|im_end|>")
VISIBLE = ("<tool_call>", "</tool_call>")
ADD: dict[str, Any] = {
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "unit": {"enum": ["cm", "m"]}},
        "required": ["a", "unit"],
    },
}
NOW = {"name": "now", "parameters": {"type": "object", "properties": {}}}
TOOLS: Any = [{"type": "function", "function": function} for function in (ADD, NOW)]
LLAMA = '{{ tools | tojson }} Respond with {"name": NAME, "parameters": {...}}. {{ messages[0].content }}'
QUESTION: Any = [{"role": "user", "content": "How long is it?"}]


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    """In place of that of other tests: calls begin and end with tokens of their own."""
    text = render_chat("chatml", QUESTION, add_generation_prompt=True, tools=TOOLS)
    tokenizer = train_bpe([text] * 4, vocab_size=400, special_tokens=(*CONTROL, *VISIBLE))
    return tokenizer.with_options(TokenOptions(visible_tokens=frozenset(VISIBLE)))


@pytest.fixture(scope="module")
def served_model(tiny_model: MakeModel, words: Tokenizer) -> Transformer:
    return tiny_model(
        torch.float32,
        vocab_size=words.vocab_size,
        mask_token_id=words.mask_token_id,
        eos_token_id=words.special_tokens["<|im_end|>"],
        pad_token_id=words.eos_token_id,
        block_length=4,
        max_position_embeddings=1024,
    ).eval()


@pytest.fixture(scope="module")
def server(start_server: StartServer, words: Tokenizer) -> RunningServer:
    stop = (words.special_tokens["<|im_end|>"],)
    return start_server(generation=GenerationConfig(stop_token_ids=stop, temperature=1.0))


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, words: Tokenizer) -> list[str]:
    """Texts that the next answers are, in place of what a random model would write."""
    texts: list[str] = []
    prepare = RequestBuilder.prepare

    def prepare_scripted(self: RequestBuilder, text: Any, *arguments: Any, **options: Any) -> Any:
        if texts:
            ids = [*words.encode(texts.pop(0), allow_special=True), words.special_tokens["<|im_end|>"]]
            allowed = {len(text.token_ids) + index: [token] for index, token in enumerate(ids)}
            text = replace(text, options=replace(text.options, allowed_token_ids=allowed))
            options["max_new_tokens"] = len(ids)
        return prepare(self, text, *arguments, **options)

    monkeypatch.setattr(RequestBuilder, "prepare", prepare_scripted)
    return texts


def check_call(call: Any) -> None:
    """A call is of one of the tools, with arguments that its schema allows."""
    arguments = json.loads(call.function.arguments)
    assert call.type == "function" and call.id.startswith("call_")
    if call.function.name == "now":
        assert arguments == {}
    else:
        assert call.function.name == "add" and [*arguments] == ["a", "unit"]
        assert arguments["a"] in range(10) and arguments["unit"] in ("cm", "m")


def collect(chunks: Iterator[Any]) -> tuple[str, list[Any], str]:
    """Content, calls and finish reason of a stream."""
    content, calls, reason = "", list[Any](), None
    for chunk in chunks:
        [choice] = chunk.choices
        delta = choice.delta
        assert delta.role or delta.content or delta.tool_calls or choice.logprobs or choice.finish_reason
        content += choice.delta.content or ""
        for delta in choice.delta.tool_calls or []:
            if delta.index == len(calls):
                assert delta.id and delta.type == "function" and delta.function.name and not delta.function.arguments
                calls.append(delta)
            else:
                assert delta.index == len(calls) - 1 and delta.id is None and delta.function.name is None
                calls[-1].function.arguments += delta.function.arguments
        reason = choice.finish_reason or reason
    assert reason is not None
    return content, calls, reason


def functions(calls: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in calls or ()]


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_random_model_writes_valid_calls(client: openai.OpenAI, choice: Any) -> None:
    for seed in range(4):
        options: Any = {"model": NAME, "messages": QUESTION, "tools": TOOLS, "tool_choice": choice, "seed": seed}
        options |= {"max_tokens": 90, "parallel_tool_calls": bool(seed % 2)}
        whole = client.chat.completions.create(**options, logprobs=True)
        message = whole.choices[0].message
        assert message.content is None and whole.choices[0].finish_reason == "tool_calls"
        for call in message.tool_calls or []:
            check_call(call)
        names = [name for name, _ in functions(message.tool_calls)]
        assert len(names) == 1 or (choice == "required" and seed % 2 and names)
        assert choice == "required" or names == ["add"]
        assert whole.usage is not None and whole.choices[0].logprobs is not None
        tokens = whole.choices[0].logprobs.content or []
        assert "".join(token.token for token in tokens).startswith('<tool_call>\n{"name": "')
        assert whole.usage.completion_tokens in (len(tokens), len(tokens) + 1)
        content, calls, reason = collect(client.chat.completions.create(**options, stream=True))
        assert (content, functions(calls), reason) == ("", functions(message.tool_calls), "tool_calls")
        assert len({call.id for call in calls}) == len(calls)
    with client.chat.completions.stream(**options) as stream:
        final = stream.get_final_completion().choices[0].message
    assert functions(final.tool_calls) == functions(message.tool_calls)


def test_required_calls_may_begin_with_a_token_of_their_own(server: RunningServer) -> None:
    """A random model takes the spelled text or the token as it prefers; biased towards the token, it writes that."""
    ids = [server.tokenizer.special_tokens[text] for text in VISIBLE]
    body = {"messages": QUESTION, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "seed": 1}
    bias = {"logit_bias": {str(token): 50 for token in ids}, "return_token_ids": True, "max_tokens": 60}
    status, _, answer = server.request("POST", "/v1/chat/completions", {**body, **bias})
    assert status == 200, answer
    token_ids = answer["choices"][0]["token_ids"]
    assert token_ids[0] == ids[0] and token_ids[-1] == ids[1]
    assert answer["choices"][0]["message"]["tool_calls"]


def test_openai_loop_of_tools(client: openai.OpenAI, server: RunningServer, script: list[str]) -> None:
    """Ask, call, tool message, answer: the second prompt is what the template writes of all that."""
    script[:] = [
        'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "unit": "m"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "It is 4 m long.",
    ]
    messages = [*QUESTION]
    while True:
        answer = client.chat.completions.create(
            model=NAME, messages=messages, tools=TOOLS, extra_body={"return_token_ids": True}
        )
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        assert message.content == "Let me see." and answer.choices[0].finish_reason == "tool_calls"
        assert functions(message.tool_calls) == [("add", '{"a": 2, "unit": "m"}'), ("now", "{}")]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "4"} for call in message.tool_calls]
    assert message.content == "It is 4 m long." and answer.choices[0].finish_reason == "stop" and len(messages) == 5
    called = [{"function": {"name": "add", "arguments": {"a": 2, "unit": "m"}}}]
    called += [{"function": {"name": "now", "arguments": {}}}]
    chat = [*QUESTION, {"role": "assistant", "content": "Let me see.", "tool_calls": called}]
    chat += [{"role": "tool", "content": "4"}] * 2
    template = CHAT_TEMPLATES["chatml"]
    expected = encode_chat(server.tokenizer, template, chat, add_generation_prompt=True, tools=TOOLS)
    assert answer.choices[0].prompt_token_ids == expected  # type: ignore[attr-defined]


def test_only_the_first_call_is_sent_without_parallel_calls(client: openai.OpenAI, script: list[str]) -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    options: Any = {"model": NAME, "messages": QUESTION, "tools": TOOLS, "parallel_tool_calls": False}
    script[:] = [f"Two.\n{call}\n{call}"] * 2
    choice = client.chat.completions.create(**options).choices[0]
    content, calls, reason = collect(client.chat.completions.create(**options, stream=True))
    assert (choice.message.content, choice.finish_reason) == (content, reason) == ("Two.", "tool_calls")
    assert functions(choice.message.tool_calls) == functions(calls) == [("now", "{}")]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("It is 4 < 5 m.", "It is 4 < 5 m.", []),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>', "", [("add", '{"a": 2}')]),
        ('So <tool_call>{"name": "sub", "arguments": {}}', 'So <tool_call>{"name": "sub", "arguments": {}}', []),
        ('<tool_call>\n{"name": "add", "arguments": {"a": ', '<tool_call>\n{"name": "add", "arguments": {"a": ', []),
    ],
)
def test_auto_parses_calls_and_loses_no_text(
    client: openai.OpenAI, script: list[str], text: str, content: str, calls: list[Any]
) -> None:
    options: Any = {"model": NAME, "messages": QUESTION, "tools": TOOLS, "logprobs": True}
    script[:] = [text] * 3
    whole = client.chat.completions.create(**options).choices[0]
    assert (whole.message.content or "", functions(whole.message.tool_calls)) == (content, calls)
    assert whole.finish_reason == ("tool_calls" if calls else "stop")
    chunks = list(client.chat.completions.create(**options, stream=True))
    streamed = collect(iter(chunks))
    assert (streamed[0], functions(streamed[1]), streamed[2]) == (content, calls, whole.finish_reason)
    tokens = [part for chunk in chunks if (parts := chunk.choices[0].logprobs) for part in parts.content or []]
    assert whole.logprobs is not None and tokens == whole.logprobs.content
    unparsed = client.chat.completions.create(**options, tool_choice="none").choices[0]
    assert unparsed.message.content == text and unparsed.message.tool_calls is None


def test_auto_beside_a_schema_is_calls_or_a_value(client: openai.OpenAI) -> None:
    """What agents with tools and an output type send."""
    schema: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": {"cm": 4}}}}
    kinds = set()
    for seed in range(8):
        options: Any = {"model": NAME, "messages": QUESTION, "tools": TOOLS, "response_format": schema, "seed": seed}
        message = client.chat.completions.create(**options, max_tokens=60).choices[0].message
        for call in message.tool_calls or []:
            check_call(call)
        assert message.tool_calls or json.loads(message.content or "") == {"cm": 4}
        kinds.add(bool(message.tool_calls))
    assert kinds == {True, False}


def test_bare_json_of_llama(start_server: StartServer, words: Tokenizer, script: list[str]) -> None:
    stop = (words.special_tokens["<|im_end|>"],)
    server = start_server(template=ChatTemplate(LLAMA), generation=GenerationConfig(stop_token_ids=stop))
    client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
    options: Any = {"model": NAME, "messages": QUESTION, "tools": TOOLS, "max_tokens": 60}
    message = client.chat.completions.create(**options, tool_choice="required").choices[0].message
    assert len(message.tool_calls or []) == 1
    check_call((message.tool_calls or [None])[0])
    for text, num_calls in (('{"name": "now", "parameters": {}}', 1), ('{"name": 4}', 0)):
        script[:] = [text]
        message = client.chat.completions.create(**options).choices[0].message
        assert (message.content, len(message.tool_calls or [])) == (None if num_calls else text, num_calls)


@pytest.mark.parametrize(
    ("source", "message"),
    [("{{ tools }}{{ messages[0].content }}", "known format"), ("{{ '<tool_call>{\"name\": ' }}", "ignores")],
)
def test_a_template_without_tools_names_another(start_server: StartServer, source: str, message: str) -> None:
    server = start_server(template=ChatTemplate(source))
    for choice in ("auto", "required"):
        body = {"messages": QUESTION, "tools": TOOLS, "tool_choice": choice}
        status, _, answer = server.request("POST", "/v1/chat/completions", body)
        assert (status, answer["error"]["param"]) == (400, "tools")
        assert message in answer["error"]["message"] and "--chat-template chatml" in answer["error"]["message"]


def test_variables_and_generation_prompts(start_server: StartServer, words: Tokenizer) -> None:
    """`chat_template_kwargs`, `add_generation_prompt` and `continue_final_message`, by the ids of the prompt."""
    server = start_server(template=CHAT_TEMPLATES["qwen3"])

    def prompt(messages: Any, **fields: Any) -> str:
        body = {"messages": messages, "max_tokens": 1, "return_token_ids": True, **fields}
        status, _, answer = server.request("POST", "/v1/chat/completions", body)
        assert status == 200, answer
        return words.decode(answer["choices"][0]["prompt_token_ids"])

    question = render_chat("qwen3", QUESTION, add_generation_prompt=False)
    start, thought = "<|im_start|>assistant\n", "<think>\n\n</think>\n\n"
    assert prompt(QUESTION) == question + start
    assert prompt(QUESTION, chat_template_kwargs={"enable_thinking": False}) == question + start + thought
    assert prompt(QUESTION, add_generation_prompt=False) == question
    for content in ("It is", "It is long: ", "4 < 5, it is <|im_end|> ", ""):
        messages = [*QUESTION, {"role": "assistant", "content": content}]
        for fields in ({}, {"add_generation_prompt": False}, {"block_origin": "turn", "attention": "block_causal"}):
            assert prompt(messages, continue_final_message=True, **fields) == question + start + thought + content


@pytest.mark.slow
def test_langchain(server: RunningServer, script: list[str]) -> None:
    """`bind_tools`, and `with_structured_output` in its three methods."""
    langchain: Any = pytest.importorskip("langchain_openai")

    class Length(BaseModel):
        """A length."""

        a: Annotated[int, Field(ge=0, le=9)]
        unit: Literal["cm", "m"]

    model = langchain.ChatOpenAI(base_url=server.url, api_key="none", model=NAME, max_retries=0, max_tokens=90, seed=1)
    for method in ("function_calling", "json_schema", "json_mode"):
        if method == "json_mode":  # any JSON object conforms
            script[:] = ['{"a": 2, "unit": "cm"}']
        value = model.with_structured_output(Length, method=method).invoke("How long is it?")
        assert isinstance(value, Length)
    assert value == Length(a=2, unit="cm")

    def now() -> str:
        """Tell the time."""
        return "noon"

    with_tools = model.bind_tools([Length, now])
    forced = model.bind_tools([Length, now], tool_choice="any", parallel_tool_calls=False)
    answer = forced.invoke("How long is it?")
    [call] = answer.tool_calls
    assert call["name"] in ("Length", "now") and not answer.invalid_tool_calls
    first, *others = forced.stream("How long is it?")
    [streamed] = sum(others, first).tool_calls
    assert (streamed["name"], streamed["args"]) == (call["name"], call["args"])
    script[:] = ['<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', "It is noon."]
    answer = with_tools.invoke("What time is it?")
    [call] = answer.tool_calls
    assert (call["name"], call["args"]) == ("now", {})
    history = [("user", "What time is it?"), answer, {"role": "tool", "tool_call_id": call["id"], "content": now()}]
    assert with_tools.invoke(history).content == "It is noon."
