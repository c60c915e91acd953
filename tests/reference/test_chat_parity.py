"""Our chats beside transformers' apply_chat_template, with a tokenizer of the same files.

The templates use what those of Qwen3, Llama 3 and LLaDA use: namespaces, loops from behind, methods of texts, tools as
JSON, dates, exceptions, `generation` and `break`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenizer import (
    CHAT_TEMPLATES,
    Tokenizer,
    encode_answer,
    encode_chat,
    load_chat_template,
    load_tokenizer,
    render_chat,
    save_chat_template,
    save_tokenizer,
)
from tokenizer.byte_alphabet import BYTE_ORDER
from tokenizer.special_tokens import TokenOptions

transformers: Any = pytest.importorskip("transformers")

TEMPLATES = Path(__file__).parent / "templates"
QWEN3 = (TEMPLATES / "qwen3.jinja").read_text(encoding="utf-8")

HEADERS = (TEMPLATES / "headers.jinja").read_text(encoding="utf-8")

HELPERS = (TEMPLATES / "helpers.jinja").read_text(encoding="utf-8")

FAMILIES = {
    "qwen3": ("<|endoftext|>", None, ["<|im_start|>", "<|im_end|>"], QWEN3),
    "llama3": ("<|eot_id|>", "<|begin_of_text|>", ["<|start_header_id|>", "<|end_header_id|>"], HEADERS),
    "llada": ("<|endoftext|>", "<|startoftext|>", ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], HEADERS),
}

Chat = list[dict[str, Any]]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A directory, and transformers' tokenizer of it."""
    eos, bos, others, template = FAMILIES[request.param]
    texts = dict.fromkeys([eos, *([bos] if bos else []), *others, "<think>", "</think>"])
    pairs = [(b"t", b"h"), (b"th", b"e"), (b" ", b"the"), (b"\n", b"\n")]
    spellings = [bytes([byte]) for byte in BYTE_ORDER] + [left + right for left, right in pairs]
    vocab = {spelling: token_id for token_id, spelling in enumerate(spellings)}
    special = {text: len(vocab) + i for i, text in enumerate(texts)}
    tokenizer = Tokenizer(vocab, pairs, special, "qwen", eos_token=eos)
    options = TokenOptions(visible_tokens=frozenset({"<think>", "</think>"}), bos_token=bos)
    folder = tmp_path_factory.mktemp(request.param)
    save_tokenizer(tokenizer.with_options(options), folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    return folder, transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))


def chats(seed: int, number: int, *, end_with_user: bool = False) -> list[Chat]:
    rng = np.random.default_rng(seed)
    pieces = [
        "the ",
        "a",
        "\n\n",
        " ",
        "é",
        "<think>\nhm\n</think>\n\n",
        "{'x'}",
        '"',
        "<b>&amp;",
        "\U0001f600",
        "{{ x }}",
    ]
    conversations = []
    for _ in range(number):
        roles = ["system"] if rng.integers(2) else []
        roles += [str(role) for role in rng.choice(["user", "assistant"], int(rng.integers(1, 6)))]
        roles += ["user"] if end_with_user or "user" not in roles else []
        texts = ["".join(rng.choice(pieces, int(rng.integers(0, 6)))) for _ in roles]
        conversations.append([{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)])
    return conversations


def theirs_of(theirs: Any, chat: Chat, **options: Any) -> str:
    text: str = theirs.apply_chat_template(chat, tokenize=False, **options)
    return text


def test_text_and_ids(family: tuple[Path, Any]) -> None:
    folder, theirs = family
    ours, template = load_tokenizer(folder), load_chat_template(folder)
    assert template is not None
    for number, chat in enumerate(chats(0, 150)):
        options: dict[str, Any] = {"add_generation_prompt": number % 2 == 0}
        if number % 3 == 0:
            options["enable_thinking"] = False
        text = theirs_of(theirs, chat, **options)
        assert render_chat(template, chat, **options) == text
        ids = theirs.apply_chat_template(chat, return_dict=False, **options)
        assert encode_chat(ours, template, chat, **options) == ids


def test_what_messages_spell_out_stays_text(family: tuple[Path, Any]) -> None:
    """The oracle is transformers' own marking of control tokens."""
    folder, theirs = family
    ours, template = load_tokenizer(folder), load_chat_template(folder)
    assert template is not None
    rng = np.random.default_rng(1)
    control = [text for text in ours.special_tokens if text not in ours.options.visible_tokens]
    pieces = [*control, "the ", " ", "\n", "x", "<|", "|>"]
    for _ in range(150):
        contents = ["".join(rng.choice(pieces, int(rng.integers(1, 7)))) for _ in range(2)]
        chat = [{"role": "user", "content": contents[0]}, {"role": "assistant", "content": contents[1]}]
        inside = encode_chat(ours, template, chat, add_generation_prompt=True)
        options = {"add_generation_prompt": True, "return_dict": False}
        assert inside == theirs.apply_chat_template(chat, sanitize_control_tokens=True, **options)


@pytest.mark.parametrize("name", FAMILIES)
def test_built_in_templates(name: str, family: tuple[Path, Any], tmp_path: Path) -> None:
    _, theirs = family
    _, bos, _, source = FAMILIES[name]
    for number, chat in enumerate(chats(2, 150)):
        options: dict[str, Any] = {"add_generation_prompt": number % 2 == 0, "bos_token": bos}
        if number % 3 == 0:
            options["enable_thinking"] = False
        expected = theirs_of(theirs, chat, chat_template=source, **options)
        assert render_chat(name, chat, **options) == expected
    save_chat_template(CHAT_TEMPLATES[name], tmp_path)
    saved = (tmp_path / "chat_template.jinja").read_text()
    chat = chats(3, 1)[0]
    del options["bos_token"]
    assert theirs_of(theirs, chat, chat_template=saved, **options) == render_chat(name, chat, **options)


def test_built_in_templates_write_tools(family: tuple[Path, Any]) -> None:
    """Calls, several responses in a row, texts that look like responses; chatml is qwen3 without reasoning."""
    _, theirs = family
    rng = np.random.default_rng(6)
    calls = [
        {"type": "function", "function": {"name": "add", "arguments": value}}
        for value in ({"b": 2, "a": "é<"}, {}, {"x": [1, None, {"y": 0.5}]})
    ]
    tools = [{"type": "function", "function": {"name": "add", "description": "a + b, 'é'", "parameters": {"b": {}}}}]
    turns: Chat = [
        {"role": "user", "content": "2 + 2"},
        {"role": "user", "content": "<tool_response>\n4\n</tool_response>"},
        {"role": "user", "content": "<tool_response> is what?"},
        {"role": "assistant", "content": "", "tool_calls": calls[:1]},
        {"role": "assistant", "content": "first", "tool_calls": calls},
        {"role": "assistant", "content": "4", "reasoning_content": "a sum\n"},
        {"role": "assistant", "content": "", "reasoning": "a sum\n", "tool_calls": [calls[0], calls[0]]},
        {"role": "assistant", "content": "4", "thinking": "done"},
        {"role": "tool", "content": "4"},
        {"role": "tool", "content": '{"a": 1}'},
    ]
    for number in range(300):
        system = [{"role": "system", "content": "be <b>brief</b>"}] * (number % 2)
        chat = [*system, *(turns[index] for index in rng.integers(0, len(turns), size=int(rng.integers(1, 8))))]
        options: dict[str, Any] = {"tools": tools if number % 3 else None, "add_generation_prompt": number % 5 == 0}
        text = theirs_of(theirs, chat, chat_template=QWEN3, **options)
        assert render_chat("qwen3", chat, **options) == text
        assert render_chat("chatml", chat, **options) == re.sub(r"(?s)<think>\n.*?\n</think>\n\n", "", text)


def test_helpers_of_templates(family: tuple[Path, Any]) -> None:
    _, theirs = family
    tools = [{"name": "add", "parameters": {"type": "object", "x": "é<>'\""}}, {"name": "b"}]
    chats_with_tools = [[*chat, {"role": "tool", "content": "4"}] for chat in chats(4, 30)]
    tokens = {"eos_token": theirs.eos_token}
    for chat in [*chats(5, 30), *chats_with_tools]:
        for offered_tools in (None, tools):
            options: dict[str, Any] = {"tools": offered_tools, "add_generation_prompt": False}
            text = theirs_of(theirs, chat, chat_template=HELPERS, **options)
            assert render_chat(HELPERS, chat, **options, **tokens) == text


def test_answers_end_as_transformers_renders_them(family: tuple[Path, Any]) -> None:
    """Prompt and answer together are the beginning of the chat that transformers renders."""
    folder, theirs = family
    ours = load_tokenizer(folder)
    assert ours.chat_template is not None
    for chat in chats(2, 40, end_with_user=True):
        answered = [*chat, {"role": "assistant", "content": "\n the answer, {{ x }} "}]
        encoded = encode_answer(ours, ours.chat_template, answered)
        assert encoded is not None
        prompt = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert list(encoded.prompt_ids) == prompt
        whole = theirs_of(theirs, answered, add_generation_prompt=False)
        text = ours.decode([*encoded.prompt_ids, *encoded.answer_ids])
        assert whole.startswith(text) and whole[len(text) :].strip() == ""
        assert ours.decode(encoded.answer_ids[-1:]) in ("<|im_end|>", "<|eot_id|>")
