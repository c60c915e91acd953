"""Encode an answer of a chat for training: what its prompt is, and which tokens are learned. Find the earlier answers
of a chat that goes on.

The prompt is what the sampler is given, the chat before the answer with the generation prompt. The end of the answer is
found by markers around its texts in one rendering of the whole chat, never by comparing renderings: texts may repeat.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from typing import Any, NamedTuple

from tokenizer.bpe import Tokenizer
from tokenizer.chat import (
    REASONING_KEYS,
    Message,
    choose_markers,
    encode_variables,
    map_texts,
    render_escaped,
    resolve_template,
    template_variables,
)
from tokenizer.chat_sandbox import render_template
from tokenizer.chat_templates import ChatTemplate

RENDERING_TIME = datetime(2025, 1, 1)
"""The time that templates see in training: the same tokens on every day."""

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\b")
_TEXT_KEYS = frozenset({"text", "name", "arguments", *REASONING_KEYS})
_REASONING_END = "</think>"
_SHOWN_CHARACTERS = 40


@dataclass(frozen=True)
class EncodedAnswer:
    """An answer with its prompt. Both are encoded apart, as when the model writes the answer."""

    prompt_ids: tuple[int, ...]
    """Equal to ``encode_chat(messages before the answer, add_generation_prompt=True)``; if the template marks its
    answers with `{% generation %}`, also what it writes before the mark. After `join_answers`, the part of it since the
    answer before."""
    answer_ids: tuple[int, ...]
    """The tokens to learn; the last one is the stop token."""


def encode_answer(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    now: datetime = RENDERING_TIME,
    is_finished: bool = True,
    encoded_pieces: dict[tuple[str, ...], list[int]] | None = None,
    **variables: Any,
) -> EncodedAnswer | None:
    """Encode the last message as an answer to those before it.

    The answer is everything from the end of the generation prompt through the stop token, which is the first special
    token after the last text of the message. What the template writes behind it is left out. If the text of the whole
    chat does not begin with the prompt, because the generation prompt contains something that the template leaves out
    of this answer, the answer begins with the content of the message.

    Args:
        messages: the last one has the role `assistant`.
        tools, variables: as in `render_chat`.
        is_finished: False: the answer ends with its last text and has no stop token, because it goes on.
        encoded_pieces: as in `Tokenizer.encode_marked`.

    Returns:
        None if the template marks the answers to learn with `{% generation %}`, but not this one.

    Raises:
        ValueError: as in `encode_chat`; or the template changes the text of the message, or hides where it ends, or
            writes no special token after it.
    """
    prompt_data = template_variables(messages[:-1], True, tools, variables)
    data = template_variables(messages, False, tools, variables)
    markers = _Markers(*choose_markers(template, data, 5))
    prompt = render_escaped(tokenizer, template, prompt_data, now, markers.escape)
    rendered = _render_marked(tokenizer, template, data, markers, now)
    _check_content(rendered, data["messages"][-1].get("content"), markers.escape)
    start, end = _find_start(rendered, prompt), rendered.text_ends[-1]

    def encode(text: str, *, is_continuation: bool = True) -> tuple[int, ...]:
        return tuple(
            tokenizer.encode_marked(
                text, markers.escape, is_continuation=is_continuation, encoded_pieces=encoded_pieces
            )
        )

    prompt_ids = encode(prompt, is_continuation=False)
    if not is_finished:
        content = data["messages"][-1]["content"]
        spaces = content[len(content.rstrip()) :]  # they are behind the marker, and templates may remove them
        end += len(spaces) if rendered.text.startswith(spaces, end) else 0
        return EncodedAnswer(prompt_ids, encode(rendered.text[start:end]))
    stop_end = _find_stop_end(tokenizer, rendered.text, end)
    if _GENERATION_TAG.search(template.source):
        tag_start = next((first for first, last in rendered.generation_spans if first < end <= last), None)
        if tag_start is None:
            return None
        if tag_start > start:
            prompt_ids, start = prompt_ids + encode(rendered.text[start:tag_start]), tag_start
    return EncodedAnswer(prompt_ids, encode(rendered.text[start:stop_end]))


def encode_answers(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    positions: Iterable[int],
    **options: Any,
) -> Iterator[EncodedAnswer | None]:
    """Encode the answers at these positions of a conversation, each after the messages before it (`encode_answer`).

    Texts that its prompts have in common are tokenized once. ``options`` are those of `encode_answer`.
    """
    pieces: dict[tuple[str, ...], list[int]] = {}
    for position in positions:
        yield encode_answer(tokenizer, template, messages[: position + 1], encoded_pieces=pieces, **options)


def encode_prompt(
    tokenizer: Tokenizer,
    template: ChatTemplate | str,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Encode a chat whose next answer is to be written, and find the ends of its earlier answers.

    Args:
        template, messages, tools, variables: as in `render_chat`.

    Returns:
        The tokens of ``encode_chat(messages, add_generation_prompt=True)``, and the position after the stop token of
        each earlier answer, ascending: none if the template changes earlier answers, so that they are other tokens
        than those that were learned.

    Raises:
        ValueError: as in `encode_chat`.
    """
    source, now = resolve_template(template), datetime.now()
    token_ids = tuple(encode_variables(tokenizer, source, template_variables(messages, True, tools, variables), now))
    positions = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    try:
        encoded = list(encode_answers(tokenizer, source, messages, positions, tools=tools, now=now, **variables))
    except ValueError:  # an answer that cannot be learned has no turn
        return token_ids, ()
    answers = [answer for answer in encoded if answer is not None]
    return token_ids, find_answer_ends(answers, token_ids) or ()


def find_answer_ends(answers: Sequence[EncodedAnswer], token_ids: Sequence[int]) -> tuple[int, ...] | None:
    """Find where the answers of a conversation end in its tokens.

    Args:
        answers: in order.
        token_ids: of the conversation, at least through the last answer.

    Returns:
        None if the prompt of an answer, or the conversation, does not begin with the tokens of the answer before it.
    """
    ends: list[int] = []
    before: tuple[int, ...] = ()
    for answer in answers:
        if answer.prompt_ids[: len(before)] != before:
            return None
        before = answer.prompt_ids + answer.answer_ids
        ends.append(len(before))
    return tuple(ends) if tuple(token_ids[: len(before)]) == before else None


def join_answers(answers: Sequence[EncodedAnswer]) -> list[EncodedAnswer] | None:
    """Leave out of each prompt the tokens of the answer before it; None if a prompt does not begin with them.

    Then the model would see other tokens in training than when it answers.
    """
    ends = find_answer_ends(answers, answers[-1].prompt_ids + answers[-1].answer_ids)
    if ends is None:
        return None
    starts = (0, *ends[:-1])
    return [
        EncodedAnswer(answer.prompt_ids[start:], answer.answer_ids)
        for start, answer in zip(starts, answers, strict=True)
    ]


class _Markers(NamedTuple):
    """Characters that occur in no text."""

    escape: str
    """Within special tokens that messages contain."""
    content_start: str
    text_end: str
    """After each text of the answer: content, reasoning, names and arguments of tool calls."""
    generation_start: str
    generation_end: str


class _RenderedChat(NamedTuple):
    text: str
    """With `_Markers.escape`, without the other markers. Positions below refer to it."""
    content_start: int | None
    text_ends: list[int]
    """End of each text of the answer."""
    generation_spans: list[tuple[int, int]]
    """What `{% generation %}` encloses."""


def _check_content(rendered: _RenderedChat, content: Any, escape: str) -> None:
    """Check that the template writes the text of the answer as it is, apart from the spaces around it.

    Of a content with reasoning, which templates move, only the part behind it is compared.

    Raises:
        ValueError: it writes another text, which the model would learn in place of the answer.
    """
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    start = rendered.content_start
    written = [rendered.text[start or 0 : end].replace(escape, "") for end in rendered.text_ends]
    for text in map(str.strip, texts):
        answer = text.rpartition(_REASONING_END)[2].strip()
        is_whole = start is not None and answer == text
        if not any(part == answer if is_whole else part.endswith(answer) for part in written):
            raise ValueError(
                f"the chat template changes the text of an answer: {answer[-_SHOWN_CHARACTERS:]!r} becomes "
                f"{written[-1][-_SHOWN_CHARACTERS:]!r}, and the model would learn that; remove the filter that does it"
            )


def _find_stop_end(tokenizer: Tokenizer, text: str, start: int) -> int:
    """Find the end of the first special token after an answer."""
    stop = tokenizer.find_control_token(text[start:])
    if stop is None:
        raise ValueError(
            "the chat template writes no special token of the tokenizer after an answer, so the model could not learn "
            "to stop: use the template that belongs to the tokenizer, or a tokenizer with its special tokens "
            "(tokenizer.special_tokens)"
        )
    return start + stop[1]


def _find_start(rendered: _RenderedChat, prompt: str) -> int:
    """Find the first position of the answer: the end of the prompt, if the text begins with it."""
    content_start = rendered.content_start
    if not rendered.text.startswith(prompt):
        if content_start is None:
            raise ValueError(
                "the chat template writes the last answer otherwise than after its generation prompt, and changes its "
                "content: it cannot be told where the answer begins"
            )
        return content_start
    if content_start is not None and content_start < len(prompt):
        raise ValueError("the chat template's generation prompt contains the answer")
    return len(prompt)


def _render_marked(
    tokenizer: Tokenizer, template: ChatTemplate, data: Mapping[str, Any], markers: _Markers, now: datetime
) -> _RenderedChat:
    """Render a chat with markers in its last message."""
    plain = render_template(template, data, now)
    escaped = map_texts(data, lambda text: tokenizer.mark_control_tokens(text, markers.escape), changes_names=True)
    tags = (markers.generation_start, markers.generation_end)
    for content_start in (markers.content_start, ""):  # templates may test how a content begins
        last = _mark_message(escaped["messages"][-1], content_start, markers.text_end)
        variables = {**escaped, "messages": [*escaped["messages"][:-1], last]}
        marked = _locate_markers(render_template(template, variables, now, tags), markers)
        if marked is not None and marked.text.replace(markers.escape, "") == plain:
            return marked
    raise ValueError(
        "the chat template changes the texts of the last answer, or leaves them out, so that its end cannot be found"
    )


def _locate_markers(text: str, markers: _Markers) -> _RenderedChat | None:
    """Remove the markers and note their positions; None if no text of the answer is there."""
    pieces = re.split(f"([{''.join(markers[1:])}])", text)
    found = list(zip(pieces[1::2], accumulate(map(len, pieces[::2])), strict=False))
    content_starts, text_ends, first, last = ([end for mark, end in found if mark == kind] for kind in markers[1:])
    content_start = min(content_starts, default=None)
    if not text_ends or (content_start is not None and content_start > text_ends[-1]):
        return None
    return _RenderedChat("".join(pieces[::2]), content_start, text_ends, list(zip(first, last, strict=False)))


def _mark_message(message: Mapping[str, Any], content_start: str, text_end: str) -> dict[str, Any]:
    """Mark the texts of an answer, inside of the spaces around them, which templates remove."""

    def mark(text: str, start: str = "") -> str:
        core = text.strip()
        return text.replace(core, f"{start}{core}{text_end}", 1) if core else text

    marked: dict[str, Any] = map_texts(dict(message), mark, _TEXT_KEYS)
    content = message.get("content")
    if isinstance(content, str):
        # An answer without text ends where it begins.
        has_text = bool(content.strip()) or marked != message
        marked["content"] = mark(content, content_start) if has_text else f"{content_start}{text_end}{content}"
    return marked
