"""What is not a request, or not one that this server serves, is refused in OpenAI's form."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from config.generation import GenerationConfig
from config.serving.server import ServeSection
from diffusionlm.models.transformer import Transformer
from diffusionlm.serving.http.answers import PreparedCall
from diffusionlm.serving.http.bodies import GenerationBody
from diffusionlm.serving.http.chat import ChatBody
from diffusionlm.serving.http.completions import CompletionBody, InfillBody
from diffusionlm.serving.http.preparation import RequestPreparer
from diffusionlm.serving.http.wire import (
    UNSUPPORTED_FIELDS,
    ApiError,
    find_key,
    parse_body,
    parse_object,
    shorten,
    to_api_error,
)
from tests.unit.serving.http.conftest import NAME
from tokenizer import CHAT_TEMPLATES, ChatTemplate, Tokenizer

ENDPOINTS: dict[str, tuple[type[GenerationBody], dict[str, Any]]] = {
    "/v1/completions": (CompletionBody, {"prompt": "the cat", "max_tokens": 2}),
    "/v1/chat/completions": (ChatBody, {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 2}),
    "/v1/infill": (InfillBody, {"segments": ["the", 2]}),
}
VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 3, 2**31, 2**70, 10**400, -0.5, 0.5, 1e-300, 1e308,
    "", "x", "the cat", "x" * 5000, "\ud800", "\x00",
    [], {}, [[]], [None], [1, "a"], [{}], {"a": 1}, {"": None}, [[1], "a"], [2**40], ["a"] * 100, [1] * 2000, [[[1]]],
    {"type": "text"}, {"include_usage": 1}, {"7": 5}, {"7": 101}, {"999999": 1}, [{"role": "user"}],
    [{"role": "tool", "content": "x"}], [{"role": "user", "content": [{"type": "image_url"}]}],
]  # fmt: skip
FIELDS = sorted(
    {*CompletionBody.model_fields, *ChatBody.model_fields, *InfillBody.model_fields, *GenerationConfig.model_fields}
    | {*UNSUPPORTED_FIELDS, "unknown", "max_new_token", "x" * 300}
)


@pytest.fixture(scope="module")
def preparer(served_model: Transformer, words: Tokenizer) -> RequestPreparer:
    return RequestPreparer(
        served_model.config, words, CHAT_TEMPLATES["chatml"], GenerationConfig(), ServeSection(), [NAME]
    )


def prepare(preparer: RequestPreparer, path: str, fields: dict[str, Any]) -> PreparedCall[GenerationBody]:
    kind, valid = ENDPOINTS[path]
    return preparer.prepare(parse_body({**valid, **fields}, kind, preparer.context), "")


@pytest.mark.parametrize("path", ENDPOINTS)
def test_any_value_of_any_field(preparer: RequestPreparer, path: str) -> None:
    """It is prepared, or refused with the name of the field, or of one that it contradicts."""
    errors = {}
    for field in FIELDS:
        for number, value in enumerate(VALUES):
            try:
                call = prepare(preparer, path, {field: value})
            except ApiError as error:
                errors[field, number] = error
            else:
                assert call.requests, (field, value)
    for case, refusal in errors.items():
        assert refusal.status in (400, 404) and refusal.param is not None, (case, refusal)
        root, field = re.split(r"[.\[]", refusal.param)[0], case[0]
        # The two exclude each other, or are too long together.
        is_too_long = refusal.code == "context_length_exceeded"
        is_of_another = root in ENDPOINTS[path][1] and (is_too_long or re.search(rf"\b{field}\b", refusal.message))
        assert root == field or refusal.param == shorten(field) or is_of_another, (case, refusal.param, refusal)
        assert len(json.dumps(refusal.body)) < 8000
    assert len(errors) > 1000


COMPLETIONS, CHATS, INFILLS = ENDPOINTS
TOOLS = [{"type": "function", "function": {"name": "add"}}]
FORMAT = {"type": "json_schema", "json_schema": {"schema": {"type": "number", "multipleOf": 1}}}
CALLS = [{"function": {"name": "f", "arguments": "{a"}}]


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        (COMPLETIONS, {"prompt": ["a"] * 65}, "prompt", "serve.max_prompts"),
        (COMPLETIONS, {"prompt": [999]}, "prompt", "outside the model's vocabulary"),
        (COMPLETIONS, {"prompt": "a " * 200_000}, "prompt", "max_position_embeddings"),
        (COMPLETIONS, {"best_of": 2}, "best_of", "except if it equals n"),
        (COMPLETIONS, {"denoising_steps": 5000}, "denoising_steps", "serve.max_steps"),
        (COMPLETIONS, {"denoising_steps": 4000, "max_tokens": 200, "block_length": 4}, "denoising_steps",
         "serve.max_total_steps"),
        (COMPLETIONS, {"attention_bias": "/etc/passwd"}, "attention_bias", "unknown field"),
        (COMPLETIONS, {"max_new_tokens": 3}, "max_tokens", "set one"),
        (COMPLETIONS, {"min_tokens": 3}, "min_tokens", "= 3 is more than the 2 new tokens"),
        (COMPLETIONS, {"min_tokens": 3, "min_new_tokens": 2}, "min_tokens", "are the same"),
        (COMPLETIONS, {"stop": ["a"] * 17}, "stop", "serve.max_stop_strings"),
        (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options", "needs stream = true"),
        (COMPLETIONS, {"logit_bias": {"7": 101}}, "logit_bias.7", "less than or equal to 100"),
        (COMPLETIONS, {"logit_bias": {"999": 1}}, "logit_bias", "outside the model's vocabulary"),
        (COMPLETIONS, {"stop_token_ids": [3, "a"]}, "stop_token_ids[1]", "valid integer"),
        (COMPLETIONS, {"suffix": "\ud800"}, "suffix", "surrogates"),
        (COMPLETIONS, {"suffix": "x", "max_tokens": None}, "suffix", "needs max_tokens"),
        (COMPLETIONS, {"suffix": "x", "ignore_eos": True}, "ignore_eos", "no effect on masked spans"),
        (COMPLETIONS, {"suffix": "x", "echo": True, "logprobs": 1}, "suffix", "no log-probabilities of the prompt"),
        (COMPLETIONS, {"stream": True, "echo": True, "logprobs": 1}, "stream", "no log-probabilities of the prompt"),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens", "needs echo or prompt_logprobs"),
        (COMPLETIONS, {"steps": 1, "max_tokens": 40}, "steps", "at least one step per block"),
        (COMPLETIONS, {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "is not supported: no text is cut"),
        (COMPLETIONS, {"request_id": "a b"}, "request_id", "should match pattern"),
        (COMPLETIONS, {"structured_outputs": {"choice": ["the cat sat"]}}, "structured_outputs", "needs at least"),
        (COMPLETIONS, {"structured_outputs": {"regex": "a"}, "response_format": FORMAT}, "structured_outputs",
         "exclude each other"),
        (COMPLETIONS, {"guided_regex": "("}, "guided_regex", "guided_regex: regex: "),
        (COMPLETIONS, {"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema"),
        (COMPLETIONS, {"response_format": {"type": "json_object", "a": 1}}, "response_format.a", "is not supported"),
        (COMPLETIONS, {"response_format": FORMAT}, "response_format", "the schema: multipleOf is not supported here"),
        (INFILLS, {"segments": ["a", 1] * 257}, "segments", "serve.max_masked_spans"),
        (INFILLS, {"segments": ["a", 2**60]}, "segments", "max_position_embeddings"),
        (INFILLS, {"segments": ["a", {"draft": ""}]}, "segments", "each at least one token long"),
        (INFILLS, {"segments": ["a", {"draft": "b", "c": 1}]}, "segments", "must be a list of texts, numbers"),
        (INFILLS, {"segments": ["a", {"draft": "the cat"}]}, "segments", "raise remask, or use p2"),
        (INFILLS, {"segments": ["a", {"draft": "cat"}], "remask": 1, "structured_outputs": {"regex": ".*"}},
         "structured_outputs", "a draft excludes reads and constraints"),
        (INFILLS, {"remask": 0.5}, "remask", "needs a draft"),
        (INFILLS, {"choices": [["a"]]}, "choices", "choices needs read = true"),
        (INFILLS, {"read": True, "choices": []}, "choices", "choices has 0 entries for 1 masked spans"),
        (INFILLS, {"read": True, "choices": [[]]}, "choices[0]", "at least 1 item"),
        (INFILLS, {"read": True, "choices": [["on the mat and the cat"]]}, "choices", "and masked span 1 has 2"),
        (INFILLS, {"read": True, "temperature": 0.5}, "temperature", "no effect on a read"),
        (INFILLS, {"structured_outputs": [None, {"regex": "a"}]}, "structured_outputs", "2 entries for 1 masked spans"),
        (INFILLS, {"structured_outputs": [{"choice": ["a"]}]}, "structured_outputs", "no text of exactly 2 tokens"),
        (CHATS, {"top_logprobs": 3}, "top_logprobs", "needs logprobs = true"),
        (CHATS, {"messages": [{"role": "user", "content": "the " * 300}]}, "messages", "max_position_embeddings"),
        (CHATS, {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice",
         "not among the tools"),
        (CHATS, {"tools": TOOLS, "tool_choice": "any"}, "tool_choice", '"required"'),
        (CHATS, {"tools": TOOLS * 2}, "tools", "two functions add"),
        (CHATS, {"tools": [{"type": "web_search"}]}, "tools[0].type", "function"),
        (CHATS, {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
                 "tool_choice": "required"}, "tools", "f: the schema: not"),
        (CHATS, {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
         "response_format", "leaves no call possible"),
        (CHATS, {"functions": TOOLS}, "functions", "not supported"),
        (CHATS, {"messages": [{"role": "user", "content": "", "tool_call_id": "x"}]}, "messages[0]", "of role tool"),
        (CHATS, {"messages": [{"role": "assistant", "tool_calls": CALLS}]},
         "messages[0].tool_calls[0].function.arguments", "is no JSON"),
        (CHATS, {"messages": [{"role": "tool", "tool_call_id": "x"}]}, "messages[0].content", "missing"),
        (CHATS, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
        (CHATS, {"continue_final_message": True}, "continue_final_message", "role assistant"),
    ],
)  # fmt: skip
def test_refused_fields(preparer: RequestPreparer, path: str, fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ApiError, match=re.escape(message)) as caught:
        prepare(preparer, path, fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    if "max_position_embeddings" in caught.value.message:
        assert caught.value.code == "context_length_exceeded"


def test_all_steps_in_one_block(preparer: RequestPreparer) -> None:
    """Blocks are counted exactly where they do not depend on the text."""
    fields = {"denoising_steps": 4096, "max_tokens": 32, "block_length": 4, "attention": "bidirectional"}
    assert prepare(preparer, COMPLETIONS, fields).requests


def test_a_message_names_its_first_key_as_a_whole_word() -> None:
    message = "denoising_steps = 3 has no effect with cache: remove it"
    assert find_key(message, ["steps", "cache", "denoising_steps"]) == "denoising_steps"


FEW: dict[str, Any] = {"max_requests": 1, "max_waiting": 1}
SHORT: dict[str, Any] = {"max_tokens": 10}


@pytest.mark.parametrize(
    ("limits", "path", "fields", "param", "message"),
    [
        (FEW, COMPLETIONS, {"prompt": ["a"] * 3}, "prompt", "at a time"),
        (FEW, COMPLETIONS, {"n": 3}, "n", "at a time"),
        (SHORT, COMPLETIONS, {"max_tokens": None, "total_length": 100}, "total_length", "at most 10"),
        (SHORT, COMPLETIONS, {"max_tokens": 11}, "max_tokens", "at most 10"),
        (SHORT, COMPLETIONS, {"max_tokens": 11, "suffix": "x"}, "max_tokens", "at most 10"),
        (SHORT, INFILLS, {"segments": ["a", 6, "b", 5]}, "segments", "at most 10"),
        ({"max_alternatives": 49}, COMPLETIONS, {"n": 5, "logprobs": 5}, "logprobs", "serve.max_alternatives"),
        ({"max_alternatives": 49}, INFILLS, {"segments": ["a", 5], "read": True, "choices": [["qzxwv"] * 10]},
         "choices", "tokens = 50, .*serve.max_alternatives"),
        (None, COMPLETIONS, {"suffix": "x"}, "suffix", "no mask token"),
    ],
)  # fmt: skip
def test_limits_of_a_server_and_a_model_without_a_mask_token(
    served_model: Transformer, words: Tokenizer, limits: Any, path: str, fields: Any, param: str, message: str
) -> None:
    model = served_model.config
    if limits is None:
        model = model.model_copy(update={"mask_token_id": None, "block_length": 1})
    preparer = RequestPreparer(model, words, None, GenerationConfig(), ServeSection(**limits or {}), [NAME])
    with pytest.raises(ApiError, match=message) as caught:
        prepare(preparer, path, fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    if limits == SHORT:
        assert prepare(preparer, INFILLS, {"segments": ["a", 5, "b", 5]}).requests


def test_fields_of_openai_that_ask_for_nothing(preparer: RequestPreparer) -> None:
    fields = {"user": "a", "prompt_cache_key": "a", "prompt_cache_retention": "24h", "safety_identifier": "a"}
    options = {"stream": True, "stream_options": {"include_obfuscation": False}}
    for path in ENDPOINTS:
        for number in range(2):
            values = {field: values for field, (_, *values) in UNSUPPORTED_FIELDS.items() if values}
            neutral = {field: choices[min(number, len(choices) - 1)] for field, choices in values.items()}
            assert prepare(preparer, path, {**fields, **options, **neutral}).requests


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        ('{"prompt": "é"}'.encode("latin-1"), "not valid JSON"),
        (b'{"n": NaN}', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON: recursion limit"),
        (b'{"n": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
    ids=range(6),
)
def test_bodies_that_are_no_objects(text: bytes, message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        parse_object(text)
    assert caught.value.status == 400


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no') }}", "{% for %}"])
def test_a_template_that_fails_ends_its_request_alone(
    served_model: Transformer, words: Tokenizer, template: str | None
) -> None:
    chat_template = None if template is None else ChatTemplate(template)
    preparer = RequestPreparer(served_model.config, words, chat_template, GenerationConfig(), ServeSection(), [NAME])
    with pytest.raises(ApiError) as caught:
        prepare(preparer, "/v1/chat/completions", {})
    assert (caught.value.status, caught.value.param) == (400, "messages")
    assert template is not None or "--chat-template NAME" in str(caught.value)


def test_a_failed_decoding_is_not_repeated() -> None:
    """The OpenAI client sends a request again after a 500; this one would fail in the same way."""
    error = to_api_error(ValueError("the constraint allows no token"))
    assert (error.status, error.headers) == (500, {"x-should-retry": "false"})
