"""Render and encode chats with chat templates."""

import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from datetime import datetime
from typing import Any

from tokenizer.bpe import Tokenizer
from tokenizer.chat_sandbox import render_template
from tokenizer.chat_templates import CHAT_TEMPLATES, ChatTemplate

Message = Mapping[str, Any]

# Unicode noncharacters, reserved for internal use in programs.
_MARKERS = frozenset(map(chr, range(0xFDD0, 0xFDF0)))
# Message keys of the reasoning before the answer; templates read the first one.
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


def render_chat(
    template: ChatTemplate | str,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """Render a chat to text.

    The template runs in a sandbox with the helper functions of transformers (`tokenizer.chat_sandbox`).

    In the text, special tokens that a message contains look like those of the template; only `encode_chat`
    distinguishes them.

    Args:
        template: a `ChatTemplate`, a name in `CHAT_TEMPLATES`, or Jinja.
        messages: mappings with `role` and usually `content`.
        add_generation_prompt: end with the beginning of the assistant's answer.
        tools: JSON schemas of functions.
        variables: other variables of the template, such as `enable_thinking`.

    Raises:
        ValueError: the messages are malformed, or the template is invalid, calls `raise_exception`, does something
            that the sandbox forbids, or writes too much.
    """
    data = template_variables(messages, add_generation_prompt, tools, variables)
    return render_template(resolve_template(template), data, datetime.now())


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate | str,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> list[int]:
    """Encode a chat; special tokens of the template become their ids.

    Nothing is added before the text of the template, which contains `bos_token` itself if the model expects it.

    Special tokens in messages, tools or variables are encoded as text, so that a message cannot end its turn and begin
    another one. Added tokens that are not marked special (`visible_tokens`, such as `<think>` of Qwen3) become ids:
    answers contain them, and templates search for them.

    Args:
        template, messages, add_generation_prompt, tools, variables: as in `render_chat`.

    Raises:
        ValueError: as in `render_chat`; or the template treats a special token in a message differently from other
            text.
    """
    data = template_variables(messages, add_generation_prompt, tools, variables)
    return encode_variables(tokenizer, resolve_template(template), data, datetime.now())


def encode_variables(tokenizer: Tokenizer, template: ChatTemplate, data: Mapping[str, Any], now: datetime) -> list[int]:
    """Encode a chat from the variables of its template; special tokens in its messages become text.

    Raises:
        ValueError: as in `render_escaped`.
    """
    (marker,) = choose_markers(template, data, 1)
    return tokenizer.encode_marked(render_escaped(tokenizer, template, data, now, marker), marker)


def render_escaped(
    tokenizer: Tokenizer, template: ChatTemplate, data: Mapping[str, Any], now: datetime, marker: str
) -> str:
    """Render a chat with `marker` in the special tokens of its messages, for `Tokenizer.encode_marked`.

    Raises:
        ValueError: the template treats a special token in a message differently from other text.
    """
    text = render_template(template, data, now)
    marked = map_texts(data, lambda part: tokenizer.mark_control_tokens(part, marker), changes_names=True)
    if marked == data:
        return text
    marked_text = render_template(template, marked, now)
    if marked_text.replace(marker, "") != text:
        raise ValueError(
            "the chat template treats special tokens in messages differently from other text: remove them from the "
            "messages"
        )
    return marked_text


def choose_markers(template: ChatTemplate, data: Mapping[str, Any], count: int) -> list[str]:
    """Choose noncharacters that neither the template nor a text contains.

    Raises:
        ValueError: there are not enough.
    """
    markers = sorted(_MARKERS.difference(template.source, json.dumps(data, ensure_ascii=False)))[:count]
    if len(markers) < count:
        raise ValueError("messages contain the noncharacters U+FDD0 to U+FDEF: remove them")
    return markers


def resolve_template(template: ChatTemplate | str) -> ChatTemplate:
    """Return a template by its name in `CHAT_TEMPLATES`, from Jinja, or as it is.

    Raises:
        ValueError: no template has this name.
    """
    if isinstance(template, ChatTemplate):
        return template
    if template not in CHAT_TEMPLATES and re.fullmatch(r"[\w.-]*", template):
        names = ", ".join(CHAT_TEMPLATES)
        raise ValueError(f"chat template {template!r} is unknown: use one of {names}, or a template in Jinja")
    return CHAT_TEMPLATES.get(template) or ChatTemplate(template)


def template_variables(
    messages: Sequence[Message],
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
) -> dict[str, Any]:
    """Build the variables of the template: copies of JSON values, so that it cannot reach other objects."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(
            f"messages {messages!r}: expected a list of mappings such as {{'role': 'user', 'content': '...'}}"
        )
    if tools is not None and (isinstance(tools, str | Mapping) or not all(isinstance(tool, Mapping) for tool in tools)):
        raise ValueError(f"tools {tools!r}: expected a list of JSON schemas")
    chat = [_copy_message(index, message) for index, message in enumerate(messages)]
    return {
        "messages": chat,
        "tools": None if tools is None else _copy_json("tools", [dict(tool) for tool in tools]),
        "documents": None,
        **{key: _copy_json(key, value) for key, value in variables.items()},
        "add_generation_prompt": bool(add_generation_prompt),
    }


def _copy_message(index: int, message: Message) -> dict[str, Any]:
    location = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise ValueError(f"{location} is {message!r}: expected a mapping with role and content")
    if not isinstance(message.get("role"), str):
        raise ValueError(f"{location} has the role {message.get('role')!r}: expected a string such as 'user'")
    plain: dict[str, Any] = _copy_json(location, dict(message))
    reasoning = next((plain[key] for key in REASONING_KEYS if plain.get(key) is not None), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _copy_json(location: str, value: Any) -> Any:
    """Copy a value that JSON can represent."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{location}: {error}; chat templates accept strings, numbers, lists and dictionaries"
        ) from None


def map_texts(
    value: Any, change: Callable[[str], str], keys: Set[str] | None = None, *, changes_names: bool = False
) -> Any:
    """Apply `change` to every string in a value.

    Args:
        keys: only to strings at or below these keys. None: to all.
        changes_names: to keys as well: those of a call's arguments are texts, too.

    Raises:
        ValueError: the value is nested too deeply.
    """
    if isinstance(value, str):
        return change(value) if keys is None else value
    try:
        if isinstance(value, list):
            return [map_texts(item, change, keys, changes_names=changes_names) for item in value]
        if isinstance(value, dict):
            return {
                change(key) if changes_names else key: map_texts(
                    item, change, None if keys is None or key in keys else keys, changes_names=changes_names
                )
                for key, item in value.items()
            }
    except RecursionError:
        raise ValueError("messages, tools or variables are nested too deeply") from None
    return value
