"""Chats: messages through a chat template to text, and to token ids."""

import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from tokenizer.bpe import Tokenizer
from tokenizer.chat_templates import CHAT_TEMPLATES, ChatTemplate

Message = Mapping[str, Any]

_MAX_DEPTH = 64
# Characters that stand for nothing and never will, for use inside of a program.
_MARKERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
# The names under which messages carry what was thought before the answer; templates read the first.
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


def render_chat(
    template: ChatTemplate | str,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """The text of a chat.

    The template runs in a sandbox, with the helpers that transformers gives it. Special tokens that a message spells
    out are in this text like those of the template: `encode_chat` tells them apart.

    Args:
        template: a `ChatTemplate`, a name in `CHAT_TEMPLATES`, or Jinja.
        messages: each a table with `role` and, as a rule, `content`.
        add_generation_prompt: end where the assistant's answer begins.
        tools: JSON schemas of functions.
        variables: whatever else the template reads, such as `enable_thinking`.

    Raises:
        ValueError: messages that are none, a mistake in the template, what it says of them by `raise_exception`, or
            something that it may not do.
    """
    data = _template_variables(messages, add_generation_prompt, tools, variables)
    return _render(_resolve_template(template), data, datetime.now())


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate | str,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
    allow_special_in_messages: bool = False,
    **variables: Any,
) -> list[int]:
    """Token ids of a chat: what the template writes as a special token becomes one.

    Nothing is put before the template's text: templates write the token that texts begin with by themselves.

    Special tokens that messages, tools or variables spell out stay text, so that nobody ends his own turn and begins
    another one's; `allow_special_in_messages` makes them ids, as in transformers by default. Added tokens that are
    not marked special (`visible_tokens`, such as Qwen3's `<think>`) become ids in either case: they are what answers
    are made of, and templates look for them.

    Args:
        template, messages, add_generation_prompt, tools, variables: as in `render_chat`.

    Raises:
        ValueError: as in `render_chat`; or the template would treat a special token that a message spells out
            differently from other text.
    """
    source = _resolve_template(template)
    data = _template_variables(messages, add_generation_prompt, tools, variables)
    now = datetime.now()
    text = _render(source, data, now)
    if allow_special_in_messages:
        return tokenizer.encode(text, allow_special=True)
    spelt = [*_iterate_texts(data), source.source]
    marker = next((char for char in _MARKERS if not any(char in part for part in spelt)), None)
    if marker is None:
        raise ValueError(f"messages use all of the characters U+FDD0 to U+FDEF, which mean nothing: remove {_MARKERS}")
    marked = {
        key: _map_texts(value, lambda part: tokenizer.mark_control_tokens(part, marker)) for key, value in data.items()
    }
    if marked == data:
        return tokenizer.encode(text, allow_special=True)
    marked_text = _render(source, marked, now)
    if unicodedata.normalize("NFC", marked_text.replace(marker, "")) != unicodedata.normalize("NFC", text):
        raise ValueError(
            "the chat template treats special tokens that messages spell out differently from other text: "
            "remove them from the messages, or let them be special with allow_special_in_messages"
        )
    return tokenizer.encode_marked(marked_text, marker)


def _resolve_template(template: ChatTemplate | str) -> ChatTemplate:
    if isinstance(template, ChatTemplate):
        return template
    if template not in CHAT_TEMPLATES and re.fullmatch(r"[\w.-]*", template):
        names = ", ".join(CHAT_TEMPLATES)
        raise ValueError(f"chat template {template!r} is unknown: use one of {names}, or a template in Jinja")
    return CHAT_TEMPLATES.get(template) or ChatTemplate(template)


def _render(template: ChatTemplate, data: Mapping[str, Any], now: datetime) -> str:
    from tokenizer.chat_sandbox import run_template  # it loads jinja2, which few who come by here need

    return run_template(template.source, {**template.tokens, **data}, now)


def _template_variables(
    messages: Sequence[Message],
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
) -> dict[str, Any]:
    """What the template sees: plain values, and copies, so that it can reach nothing through them."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(
            f"messages {messages!r}: expected a list of tables such as {{'role': 'user', 'content': '...'}}"
        )
    if tools is not None and (isinstance(tools, str | Mapping) or not all(isinstance(tool, Mapping) for tool in tools)):
        raise ValueError(f"tools {tools!r}: expected a list of JSON schemas")
    chat = [_copy_message(index, message) for index, message in enumerate(messages)]
    return {
        "messages": chat,
        "tools": None if tools is None else _copy_json("tools", list(tools)),
        "documents": None,
        **{key: _copy_json(key, value) for key, value in variables.items()},
        "add_generation_prompt": bool(add_generation_prompt),
    }


def _copy_message(index: int, message: Message) -> dict[str, Any]:
    place = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise ValueError(f"{place} is {message!r}: expected a table with role and content")
    if not isinstance(message.get("role"), str):
        raise ValueError(f"{place} has the role {message.get('role')!r}: expected a text such as 'user'")
    plain: dict[str, Any] = _copy_json(place, message)
    thoughts = next((plain[key] for key in _REASONING_KEYS if plain.get(key) is not None), None)
    return plain if thoughts is None else {"thinking": thoughts, **plain, "reasoning_content": thoughts}


def _copy_json(place: str, value: Any, depth: int = 0) -> Any:
    """A copy of what JSON can express."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"{place} is nested more than {_MAX_DEPTH} deep")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{place} has the key {key!r}: expected a text")
        return {str(key): _copy_json(f"{place}.{key}", item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copy_json(f"{place}[{index}]", item, depth + 1) for index, item in enumerate(value)]
    for kind in (bool, str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if value is None:
        return None
    raise ValueError(f"{place} is a {type(value).__name__}: chat templates take texts, numbers, lists and tables")


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """The value with `change` made to every text in it, but not to keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_texts(item, change) for item in value]
    if isinstance(value, dict):
        return {key: _map_texts(item, change) for key, item in value.items()}
    return value


def _iterate_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _iterate_texts(item)
    if isinstance(value, dict):
        yield from value
