"""One conversation in every format is the same conversation; irregular rows have a reason."""

from __future__ import annotations

import json
from datetime import date
from typing import Any

import pytest

from config.finetune.chat import ChatRowsConfig
from diffusionlm.data.chat.conversation import Conversation
from diffusionlm.data.chat.formats import ChatRowParser
from diffusionlm.data.sources.record_source import BadRecord

SYSTEM, Q1, A1, Q2, A2 = "Be brief.", "One?", "1", "Two?", "2"


def turn(role: str, content: Any, **keys: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **keys}


def shared(name: str, value: Any) -> dict[str, Any]:
    return {"from": name, "value": value}


CANONICAL = [turn("system", SYSTEM), turn("user", Q1), turn("assistant", A1), turn("user", Q2), turn("assistant", A2)]

EQUAL_ROWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "messages": ({"messages": CANONICAL}, {}),
    "content parts": (
        {"messages": [turn(m["role"], [{"type": "text", "text": c} for c in m["content"]]) for m in CANONICAL]},
        {},
    ),
    "messages with other keys": ({"messages": [m | {"id": 3, "weight": None} for m in CANONICAL], "source": "x"}, {}),
    "messages as JSON text": ({"messages": json.dumps(CANONICAL)}, {}),
    "sharegpt": (
        {
            "system": SYSTEM,
            "conversations": [shared("human", Q1), shared("gpt", A1), shared("human", Q2), shared("gpt", A2)],
        },
        {},
    ),
    "conversations with roles": ({"conversations": CANONICAL}, {}),
    "alpaca": ({"instruction": Q2, "input": "", "output": A2, "history": [[Q1, A1]], "system": SYSTEM}, {}),
    "prompt and completion": ({"prompt": CANONICAL[:4], "completion": CANONICAL[4:]}, {}),
    "completion as text": ({"prompt": CANONICAL[:4], "completion": A2}, {}),
    "own columns and roles": (
        {"chat": [{"who": w, "says": m["content"]} for w, m in zip("sqaqa", CANONICAL, strict=True)]},
        {
            "columns": {"messages": "chat", "role": "who", "content": "says"},
            "roles": {"s": "system", "q": "user", "a": "assistant"},
        },
    ),
    "weights of 1": ({"messages": [m | {"weight": 1, "train": True} for m in CANONICAL], "label": "good"}, {}),
    "system of the config": ({"messages": CANONICAL[1:]}, {"system": SYSTEM}),
}


def parse(row: dict[str, Any], **options: Any) -> Conversation | BadRecord:
    return ChatRowParser(ChatRowsConfig.model_validate(options))(row)


@pytest.mark.parametrize(("row", "options"), EQUAL_ROWS.values(), ids=EQUAL_ROWS)
def test_every_format_gives_the_same_conversation(row: dict[str, Any], options: dict[str, Any]) -> None:
    conversation = parse(row, **options)
    assert conversation == Conversation(tuple(CANONICAL))
    assert json.loads(conversation.to_json()) == {"messages": CANONICAL}


def test_short_formats() -> None:
    expected = parse({"messages": [turn("user", "2+2\nshort"), turn("assistant", "4")]})
    assert parse({"instruction": "2+2", "input": "short", "output": "4"}) == expected
    columns = {"prompt": "question", "completion": "answer"}
    assert parse({"question": "2+2\nshort", "answer": "4"}, columns=columns) == expected
    assert parse({"prompt": "2+2\nshort", "completion": "4"}, format="prompt_completion") == expected


def test_tools_and_reasoning() -> None:
    arguments = {"x": 1}
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    expected = [
        turn("user", "q"),
        turn("assistant", "", tool_calls=[call]),
        turn("tool", "7"),
        turn("assistant", "seven", reasoning_content="hm"),
    ]
    as_text = call | {"function": {"name": "f", "arguments": json.dumps(arguments)}}
    rows: list[dict[str, Any]] = [
        {"messages": [*expected[:1], turn("assistant", None, tool_calls=[as_text]), *expected[2:]], "tools": [tool]},
        {
            "conversations": [
                shared("human", "q"),
                shared("function_call", json.dumps({"name": "f", "arguments": arguments})),
                shared("observation", "7"),
                {"from": "gpt", "value": "seven", "thinking": "hm"},
            ],
            "tools": json.dumps([tool]),
        },
    ]
    for row in rows:
        assert parse(row) == Conversation(tuple(expected), (tool,))


def test_tools_and_calls_keep_the_order_of_their_keys() -> None:
    call = {"id": "7", "function": {"arguments": {"z": 1, "a": {"y": 2, "b": 3}}, "name": "f"}, "type": "function"}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"z": {}, "a": {}}, "description": "d"}}
    row = {"messages": [turn("user", "q"), turn("assistant", "", tool_calls=[call])], "tools": [tool]}
    conversation = parse(row)
    assert isinstance(conversation, Conversation), conversation
    assert json.dumps(conversation.tools) == json.dumps([tool])
    assert json.dumps(conversation.messages[1]["tool_calls"]) == json.dumps([call])


def test_preferences() -> None:
    expected = parse({"prompt": "q", "chosen": "good", "rejected": "bad"})
    assert isinstance(expected, Conversation)
    assert expected.messages == (turn("user", "q"), turn("assistant", "good"))
    assert expected.rejected == (turn("user", "q"), turn("assistant", "bad"))
    answers = {key: [turn("assistant", text)] for key, text in (("chosen", "good"), ("rejected", "bad"))}
    whole = {key: [turn("user", "q"), *answer] for key, answer in answers.items()}
    assert parse({"prompt": [turn("user", "q")], **answers}) == expected
    assert parse({"prompt": "q", **whole}) == expected
    assert parse(whole) == expected, "the prompt is the common beginning"
    assert sorted(json.loads(expected.to_json())) == ["chosen", "prompt", "rejected"]


ANSWERS = {"chosen": shared("gpt", A2), "rejected": shared("gpt", "3")}
SHAREGPT = [shared("human", Q1), shared("gpt", A1), shared("human", Q2)]
RANKED_ROWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sharegpt": ({"system": SYSTEM, "conversations": SHAREGPT, **ANSWERS}, {}),
    "sharegpt of the section": ({"system": SYSTEM, "conversations": SHAREGPT, **ANSWERS}, {"format": "preference"}),
    "alpaca": ({"system": SYSTEM, "instruction": Q2, "history": [[Q1, A1]], "chosen": A2, "rejected": "3"}, {}),
    "dataset_info of alpaca": (
        {"sys": SYSTEM, "ask": "Two", "more": "?", "past": [[Q1, A1]], "good": A2, "bad": "3"},
        {
            "columns": {
                "prompt": "ask",
                "query": "more",
                "system": "sys",
                "history": "past",
                "chosen": "good",
                "rejected": "bad",
            }
        },
    ),
    "dataset_info of sharegpt": (
        {
            "chat": [{"who": name, "says": m["content"]} for name, m in zip("shah", CANONICAL, strict=False)],
            "good": {"who": "a", "says": A2},
            "bad": {"who": "a", "says": "3"},
        },
        {
            "columns": {"messages": "chat", "chosen": "good", "rejected": "bad"},
            "tags": {
                "role_tag": "who",
                "content_tag": "says",
                "system_tag": "s",
                "user_tag": "h",
                "assistant_tag": "a",
            },
        },
    ),
}


@pytest.mark.parametrize(("row", "options"), RANKED_ROWS.values(), ids=RANKED_ROWS)
def test_ranked_answers_of_llama_factory(row: dict[str, Any], options: dict[str, Any]) -> None:
    conversation = parse(row, **options)
    assert isinstance(conversation, Conversation), conversation
    prompts = [tuple(m | {"content": m["content"].replace("\n", "")} for m in conversation.messages)]
    assert prompts == [tuple(CANONICAL)] and conversation.rejected is not None
    assert conversation.rejected == (*conversation.messages[:-1], turn("assistant", "3"))


LABELED_ROWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "TRL": ({"prompt": "q", "completion": "a", "label": False}, {}),
    "TRL, messages": ({"prompt": [turn("user", "q")], "completion": [turn("assistant", "a")], "label": 0}, {}),
    "messages": ({"messages": [turn("user", "q"), turn("assistant", "a")], "kto_tag": False}, {}),
    "alpaca": (
        {"ask": "q", "answer": "a", "good": False},
        {"columns": {"prompt": "ask", "response": "answer", "kto_tag": "good"}},
    ),
    "sharegpt": (
        {"conversations": [shared("human", "q"), shared("gpt", "a")], "good": False},
        {"columns": {"label": "good"}},
    ),
}


@pytest.mark.parametrize(("row", "options"), LABELED_ROWS.values(), ids=LABELED_ROWS)
def test_labeled_answers(row: dict[str, Any], options: dict[str, Any]) -> None:
    conversation = parse(row, format="unpaired", **options)
    assert conversation == Conversation((turn("user", "q"), turn("assistant", "a")), is_desirable=False)
    assert json.loads(conversation.to_json())["label"] is False
    for label in (None, "yes", 2):
        record = parse({key: label if value in (False, 0) else value for key, value in row.items()}, format="unpaired")
        assert isinstance(record, BadRecord) and "chat.columns" in record.detail


BAD_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown role": ({"messages": [turn("wizard", "x"), turn("assistant", "y")]}, "unknown role"),
    "no role": ({"messages": [{"content": "x"}]}, "message without role"),
    "two users": (
        {"messages": [turn("user", "x"), turn("user", "y"), turn("assistant", "z")]},
        "user message after user",
    ),
    "two answers": ({"messages": [*CANONICAL, turn("assistant", "z")]}, "two assistant messages"),
    "late system": ({"messages": [*CANONICAL[1:], turn("system", "x")]}, "system message after"),
    "empty answer": ({"messages": [turn("user", "x"), turn("assistant", " \n")]}, "empty answer"),
    "no messages": ({"messages": []}, "no messages"),
    "number": ({"messages": [turn("user", 3), turn("assistant", "x")]}, "content is not text"),
    "video": ({"messages": [turn("user", [{"type": "video", "url": "x"}]), turn("assistant", "x")]}, "content part"),
    "image": ({"messages": [turn("user", [{"type": "image", "url": "x"}]), turn("assistant", "x")]}, "image cannot"),
    "message is text": ({"messages": ["x"]}, "message is no object"),
    "other columns": ({"text": "x"}, "no conversation"),
    "broken call": (
        {"conversations": [shared("human", "x"), shared("function_call", "{")]},
        "function_call is no JSON",
    ),
    "history is a number": ({"instruction": "x", "output": "y", "history": 5}, "history is no list of pairs"),
    "date in tools": ({"prompt": "x", "completion": "y", "tools": [{"when": date(2020, 1, 1)}]}, "value is no JSON"),
    "equal preference": ({"prompt": "x", "chosen": "y", "rejected": "y"}, "chosen and rejected are equal"),
    "surrogate": ({"prompt": "x", "completion": "\ud800"}, "lone surrogate"),
    "weight between": ({"messages": [turn("user", "x"), turn("assistant", "y", weight=0.5)]}, "weight is neither 0"),
    "nothing to learn": ({"messages": [turn("user", "x"), turn("assistant", "y", weight=0)]}, "no answer to learn"),
    "chosen is no target": (
        {"prompt": "x", "chosen": [turn("assistant", "y", train=False)], "rejected": "z"},
        "no answer to learn",
    ),
    "rejected": ({"prompt": "x", "completion": "y", "label": False}, "unpaired preference"),
    "rejected by its tag": (
        {"conversations": [shared("human", "x"), shared("gpt", "y")], "kto_tag": False},
        "unpaired preference",
    ),
    "ranked without prompt": ({"chosen": "y", "rejected": "z"}, "preference without prompt"),
    "rejected chat": ({"messages": [turn("user", "x"), turn("assistant", "y")], "label": False}, "unpaired preference"),
    "system is a number": ({"system": 1, "prompt": "x", "completion": "y"}, "system is not text"),
}


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_irregular_rows_have_a_reason(row: dict[str, Any], reason: str) -> None:
    record = parse(row)
    assert isinstance(record, BadRecord), record
    assert record.reason.startswith(reason) and record.detail
    assert record.repaired_text is None


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CANONICAL, "label": True},
        {"prompt": "x", "chosen": "y", "rejected": "z", "label": False},
        {"prompt": "x", "completion": "y", "label": 2},
        {"prompt": "x", "completion": "y", "label": "0"},
    ],
)
def test_other_columns_named_label_mean_nothing(row: dict[str, Any]) -> None:
    assert parse(row) == parse({key: value for key, value in row.items() if key != "label"})
    assert isinstance(parse(row), Conversation)


@pytest.mark.parametrize("mark", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"weight": 1, "train": 0}])
@pytest.mark.parametrize("answer", ["messages", "conversations", "call"])
def test_answers_with_weight_0_are_context(mark: dict[str, Any], answer: str) -> None:
    first: dict[str, Any] = turn("assistant", "no")
    if answer == "call":
        first = {"from": "function_call", "value": '{"name": "f"}'}
    elif answer == "conversations":
        first = shared("gpt", "no")
    messages = [turn("user", "x"), first | mark, turn("tool" if answer == "call" else "user", "y")]
    conversation = parse({"messages": [*messages, turn("assistant", "z", weight=1, train=True)]})
    assert isinstance(conversation, Conversation), conversation
    assert conversation.learned_answers == [3]
    assert all(key not in message for message in conversation.messages for key in ("weight", "train"))


def test_options_of_the_section() -> None:
    empty = {"messages": [turn("user", "x"), turn("assistant", "")]}
    assert isinstance(parse(empty, allow_empty_answers=True), Conversation)
    record = parse({"messages": CANONICAL}, format="alpaca")
    assert isinstance(record, BadRecord) and record.reason == "no column 'instruction'"
    for options, problem in (
        ({"columns": {"question": "q"}}, "no field of a format"),
        ({"eos_padding": "length:0"}, "length:N"),
        ({"roles": {"x": "wizard"}}, "system"),
        ({"format": "preference", "turns": "all"}, "last answer"),
        ({"columns": {"query": "a", "input": "b"}}, "'input' is given twice"),
        ({"tags": {"human_tag": "human"}}, "user_tag"),
    ):
        with pytest.raises(ValueError, match=problem):
            ChatRowsConfig.model_validate(options)
