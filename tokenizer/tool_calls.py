"""Calls of tools in the text of an answer: how chat templates write them, and their parsing as the text arrives."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

import regex  # type: ignore[import-untyped, unused-ignore]

from tokenizer.chat_templates import ChatTemplate


@dataclass(frozen=True)
class ToolCallFormat:
    """How templates write a call: ``opening {"name": NAME, KEY: ARGUMENTS} closing``."""

    arguments_key: str
    source_pattern: str
    """A template whose source has a match writes calls like this."""
    opening: str = ""
    """Empty: an answer that is a call is nothing else."""
    closing: str = ""
    separator: str | None = None
    """Between two calls of an answer. None: an answer has one call."""

    def enclose_arguments(self, name: str) -> tuple[str, str]:
        """Text of a call before and after its arguments."""
        return f'{self.opening}{{"name": "{name}", "{self.arguments_key}": ', f"}}{self.closing}"


TOOL_CALL_FORMATS = {
    "hermes": ToolCallFormat(
        "arguments", r'(?s)<tool_call>.{0,40}?\{\\?"name\\?"', "<tool_call>\n", "\n</tool_call>", separator="\n"
    ),
    "llama3_json": ToolCallFormat("parameters", r'(?s)\{\\?"name\\?".{1,80}?"parameters\\?"'),
}
"""Formats of the families, in the order in which templates are matched: Hermes and Qwen; Llama 3.1 and later."""


def find_tool_call_format(template: ChatTemplate) -> ToolCallFormat:
    """Find how a template writes calls, by its source.

    Raises:
        ValueError: in no format that is known.
    """
    for call_format in TOOL_CALL_FORMATS.values():
        if regex.search(call_format.source_pattern, template.source):
            return call_format
    raise ValueError(
        'tools: the chat template writes calls in no known format, <tool_call>{"name": ..., "arguments": ...} or '
        '{"name": ..., "parameters": ...}: use another one, such as diffusionlm-serve --chat-template chatml'
    )


@dataclass(frozen=True)
class CallPiece:
    """New text of a call."""

    index: int
    """Number of the call in the answer."""
    name: str | None = None
    """Of the tool; None: it was in a piece before."""
    arguments: str = ""


class ToolCallParser:
    """Splits an answer into its content and its calls, the same ones however the text is split when it arrives.

    A call has the name of a tool and a JSON object of arguments, as templates write it; Llama 3 often puts its type
    before. Everything else is content, except spaces beside
    calls. Text that may become a call is held back until that is decided.

    Args:
        names: of the tools.
        is_constrained: the text is certainly calls, so that arguments are passed on before their end.
    """

    def __init__(self, call_format: ToolCallFormat, names: Iterable[str], *, is_constrained: bool = False) -> None:
        self._opening, self._closing = call_format.opening.strip(), call_format.closing.strip()
        self._is_constrained = is_constrained
        options = "|".join(map(regex.escape, names))
        self._head = regex.compile(
            r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?'
            rf'"name"\s*:\s*"({options})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
        )
        self.num_calls = 0
        self.has_open_call = False
        """The arguments of a further call have begun and not ended."""
        self._text = ""
        """What was not passed on yet, with the whole of an open call."""
        self._num_sent = 0
        """Characters of the arguments of the open call."""
        self._can_begin, self._awaits_closing, self._follows_call = True, False, False

    def push(self, text: str, *, is_last: bool = False) -> list[str | CallPiece]:
        """Add text; returns what is decided: texts of the content, and pieces of calls."""
        self._text += text
        pieces = []
        while (piece := self._take_next(is_last)) is not None:
            if piece:
                pieces.append(piece)
        return pieces

    def _take_next(self, is_last: bool) -> str | CallPiece | None:
        """The next piece, "" for progress without one; None: more text is needed."""
        if self._awaits_closing:
            rest = self._text.lstrip()
            if self._closing.startswith(rest) and rest != self._closing and not is_last:
                return None
            self._text = rest.removeprefix(self._closing) if rest.startswith(self._closing) else self._text
            self._awaits_closing = False
        start = self._text.find(self._opening) if self._can_begin else -1
        if start < 0:
            return self._take_content(is_last)
        if content := self._text[:start].rstrip():
            return self._pass_on(len(content))
        start += len(self._opening)
        head = self._head.match(self._text, start, partial=not is_last)
        if head is None:
            return self._refuse(start)
        return None if head.partial else self._take_call(start, head, is_last)

    def _take_call(self, start: int, head: regex.Match[str], is_last: bool) -> str | CallPiece | None:
        end = _find_object_end(self._text, head.end())
        arguments, rest = self._text[head.end() : end], "" if end is None else self._text[end:].lstrip()
        is_whole = rest.startswith("}")
        if not is_whole and not self._is_constrained:
            return None if not (rest or is_last) else self._refuse(start)
        piece = CallPiece(self.num_calls, None if self.has_open_call else head[1], arguments[self._num_sent :])
        self._num_sent, self.has_open_call = len(arguments), True
        if is_whole:
            self.num_calls, self._text, self._num_sent, self.has_open_call = self.num_calls + 1, rest[1:], 0, False
            self._can_begin, self._awaits_closing, self._follows_call = bool(self._opening), bool(self._closing), True
        if piece.name is None and not piece.arguments:
            return "" if is_whole else None
        return piece

    def _refuse(self, end: int) -> str:
        """Pass on as content what looked like the beginning of a call."""
        self._can_begin = bool(self._opening)
        return self._pass_on(end)

    def _take_content(self, is_last: bool) -> str | None:
        end = len(self._text)
        if not is_last:
            lengths = range(1, len(self._opening))
            end -= max((length for length in lengths if self._text.endswith(self._opening[:length])), default=0)
            end = len(self._text[:end].rstrip())
        elif self._follows_call and self._text.isspace():
            end = 0
        return self._pass_on(end) if end else None

    def _pass_on(self, end: int) -> str:
        self._follows_call = False
        piece, self._text = self._text[:end], self._text[end:]
        return piece


_DECODER = json.JSONDecoder(parse_constant=int)
"""``int`` refuses NaN and Infinity."""


def _find_object_end(text: str, start: int) -> int | None:
    """Position after a JSON object; None: it is not whole, or is none."""
    try:
        return _DECODER.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None
