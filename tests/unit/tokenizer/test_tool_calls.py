"""Calls of tools: what templates write is what the parser reads, whole and however it is split; no text is lost."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from tokenizer import CHAT_TEMPLATES, ChatTemplate, render_chat
from tokenizer.tool_calls import TOOL_CALL_FORMATS, CallPiece, ToolCallParser, find_tool_call_format

HERMES, LLAMA = TOOL_CALL_FORMATS["hermes"], TOOL_CALL_FORMATS["llama3_json"]
NAMES = ("add", "now", "add.all")
VALUES: list[dict[str, Any]] = [
    {"a": 1, "b": [2.5, None, {"c": True}]},
    {},
    {"text": 'says "}" \\ and </tool_call> or <tool_call>{"name": "add", "arguments": {}} é\U0001f600\n'},
]


def parse(pieces: list[str], call_format: Any = HERMES, **options: Any) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls of a text that arrives in pieces."""
    parser = ToolCallParser(call_format, NAMES, **options)
    content, calls = "", list[list[str]]()
    for number, text in enumerate(pieces, 1):
        for piece in parser.push(text, is_last=number == len(pieces)):
            if isinstance(piece, str):
                content += piece
            elif piece.name is not None:
                assert piece.index == len(calls)
                calls.append([piece.name, piece.arguments])
            else:
                assert piece.index == len(calls) - 1
                calls[-1][1] += piece.arguments
    return content, [(name, arguments) for name, arguments in calls]


def splits(text: str) -> list[list[str]]:
    """All splits in two, and into characters."""
    return [*([text[:cut], text[cut:]] for cut in range(len(text) + 1)), [*text, ""], list(text)]


@pytest.mark.parametrize("name", ["chatml", "qwen3"])
def test_round_trip_through_templates(name: str) -> None:
    """A conversation's calls are parsed from what the template writes of them."""
    calls = [{"function": {"name": tool, "arguments": value}} for tool, value in zip(NAMES, VALUES, strict=True)]
    template = CHAT_TEMPLATES[name]
    assert find_tool_call_format(template) == HERMES
    for content in ("", "two calls:"):
        for tool_calls in (calls[:1], calls):
            question = {"role": "user", "content": "?"}
            message = {"role": "assistant", "content": content, "tool_calls": tool_calls}
            prompt = render_chat(template, [question], add_generation_prompt=True, enable_thinking=False)
            text = render_chat(template, [question, message], add_generation_prompt=False)
            answer = text.removeprefix(prompt).removesuffix("<|im_end|>\n")
            for pieces in splits(answer):
                found, parsed = parse(pieces)
                assert found == content
                assert [(tool, json.loads(value)) for tool, value in parsed] == [
                    (call["function"]["name"], call["function"]["arguments"]) for call in tool_calls
                ]


@pytest.mark.parametrize("call_format", [HERMES, LLAMA])
def test_constrained_arguments_are_passed_on_as_they_arrive(call_format: Any) -> None:
    for name, value in zip(NAMES, VALUES, strict=True):
        arguments = json.dumps(value)
        before, after = call_format.enclose_arguments(name)
        for pieces in splits(before + arguments + after):
            for is_constrained in (False, True):
                assert parse(pieces, call_format, is_constrained=is_constrained) == ("", [(name, arguments)])
    parser = ToolCallParser(call_format, NAMES, is_constrained=True)
    assert parser.push(before + '{"te') == [CallPiece(0, "add.all", '{"te')]
    assert parser.push('xt": "') == [CallPiece(0, arguments='xt": "')] and parser.has_open_call
    assert parser.push('"}}') == [CallPiece(0, arguments='"}')] and not parser.has_open_call


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "num_calls"),
    [
        ("no call < <tool", "no call < <tool", 0),
        ("a <tool_call>b", "a <tool_call>b", 0),
        (CALL.replace("add", "sub"), CALL.replace("add", "sub"), 0),
        (CALL.replace("{", "{{", 1), CALL.replace("{", "{{", 1), 0),
        (CALL.replace("1}", '1}, "id": 3'), CALL.replace("1}", '1}, "id": 3'), 0),
        (CALL.replace("1", "NaN"), CALL.replace("1", "NaN"), 0),
        (CALL.replace("1", "01"), CALL.replace("1", "01"), 0),
        (CALL[:-20], CALL[:-20], 0),
        (CALL[:-12], "", 1),
        (CALL[:-3], "</tool_ca", 1),
        (f"<tool_call><tool_call>{CALL}", "<tool_call><tool_call>", 1),
        (f" \n{CALL} \n {CALL}\n", "", 2),
        (f"first \n {CALL}\n then {CALL} last\n", "first\n then last\n", 2),
        ("spaces  \n", "spaces  \n", 0),
        ("\n \n", "\n \n", 0),
        ("", "", 0),
    ],
)  # fmt: skip
def test_what_is_no_call_stays_content(text: str, content: str, num_calls: int) -> None:
    for pieces in splits(text):
        found, calls = parse(pieces)
        assert (found, calls) == (content, [("add", '{"a": 1}')] * num_calls), pieces


@pytest.mark.parametrize(
    ("text", "content", "num_calls"),
    [
        ('\n{"name": "add", "parameters": {"a": 1}}\n', "", 1),
        ('{"name" : "add","arguments":{"a": 1} } and more', " and more", 1),
        ('{"type": "function", "name": "add", "parameters": {"a": 1}}', "", 1),
        ('{"name": "sub", "parameters": {"a": 1}}', '{"name": "sub", "parameters": {"a": 1}}', 0),
        ('so: {"name": "add", "parameters": {"a": 1}}', 'so: {"name": "add", "parameters": {"a": 1}}', 0),
        ('{"answer": {"a": 1}} ', '{"answer": {"a": 1}} ', 0),
    ],
)
def test_bare_json_is_a_call_at_the_beginning_of_an_answer(text: str, content: str, num_calls: int) -> None:
    for pieces in splits(text):
        assert parse(pieces, LLAMA) == (content, [("add", '{"a": 1}')] * num_calls), pieces


def test_text_is_held_back_no_longer_than_it_may_become_a_call() -> None:
    parser = ToolCallParser(HERMES, NAMES)
    text = 'one <tool>two\n\n<tool_call>\n{"name": "ad", three'
    released = [0]
    for character in text:
        released.append(released[-1] + sum(len(piece) for piece in parser.push(character) if isinstance(piece, str)))
    held = [number - length for number, length in enumerate(released)]
    assert held[len("one <tool>")] == 0 and held[len("one ")] == 1
    assert held[text.index('", three')] == len('\n\n<tool_call>\n{"name": "ad')
    assert held[-1] == 0 and all(after >= before for before, after in pairwise(released))


def test_formats_of_templates() -> None:
    for source, expected in (
        ('{{ \'<tool_call>\\n{"name": "\' + c.name + \'", "arguments": \' }}', HERMES),
        ('{{ "<tool_call>\\n{\\"name\\": <n>, \\"arguments\\": <a>}" }}', HERMES),
        ("{{ '{\"name\": \"' + c.name + '\", ' }}{{ '\"parameters\": ' }}", LLAMA),
    ):
        assert find_tool_call_format(ChatTemplate(source)) == expected
    for source in (
        "{{ '<tool_call>\\n<function=' + c.name }}{{ c.arguments }}",
        '<tool_call>\n{"arguments": <args-dict>, "name": <function-name>}\n</tool_call>',
        "[TOOL_CALLS] [{'name': c.name, 'arguments': c.arguments}]",
        CHAT_TEMPLATES["llama3"].source,
    ):
        with pytest.raises(ValueError, match=r"no known format.*--chat-template chatml"):
            find_tool_call_format(ChatTemplate(source))
