"""Render chat templates in Jinja's sandbox, with the helper functions of transformers.

A template is a program of a checkpoint. The sandbox keeps it from everything but its variables, and the text that it
writes has a maximum length. Its time and memory are not limited.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARACTERS = 1 << 24
"""Maximum length of the text that a template writes."""

MAX_ERROR_CHARACTERS = 1000
"""Longer errors are cut."""

_GENERATION_MARKERS = ("_generation_start", "_generation_end")
"""Variables that `{% generation %}` writes around its contents."""


def render_template(
    source: str, variables: Mapping[str, Any], now: datetime, generation_markers: tuple[str, str] = ("", "")
) -> str:
    """Render a template.

    Args:
        source: Jinja.
        variables: JSON values.
        now: the time that `strftime_now` formats.
        generation_markers: texts that are inserted before and after what `{% generation %}` encloses.

    Raises:
        ValueError: the template is invalid, raises an exception, does something forbidden, or writes too much.
    """
    context = {
        "strftime_now": now.strftime,
        **variables,
        **dict(zip(_GENERATION_MARKERS, generation_markers, strict=True)),
    }
    pieces: list[str] = []
    size = 0
    try:
        for piece in _compile_template(source).generate(context):
            size += len(piece)
            if size > MAX_CHARACTERS:
                raise SecurityError(f"it writes more than {MAX_CHARACTERS:,} characters")
            pieces.append(piece)
    except Exception as error:  # a template is a program, which may raise anything
        raise ValueError(f"the chat template cannot be applied: {_describe_error(error)}") from None
    return "".join(pieces)


def _describe_error(error: Exception) -> str:
    """Describe what a template has raised, in one line."""
    if not isinstance(error, TemplateError):
        return _shorten(f"{type(error).__name__}: {error}") + "; do the messages match it?"
    number = getattr(error, "lineno", None)
    return _shorten(str(error.message)) + ("" if number is None else f" (line {number})")


def _shorten(message: str) -> str:
    """One line without control characters, of limited length."""
    words = " ".join(message[: MAX_ERROR_CHARACTERS + 1].split())
    line = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in words)
    return line if len(message) <= MAX_ERROR_CHARACTERS else f"{line[:MAX_ERROR_CHARACTERS]}..."


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks the assistant's text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        start, end = (nodes.Output([nodes.Name(name, "load")]) for name in _GENERATION_MARKERS)
        return nodes.Scope([start, *body, end]).set_lineno(line)


@lru_cache(maxsize=8)
def _compile_template(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.pop("lipsum")
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(source)


def _raise_exception(message: str) -> None:
    raise TemplateError(str(message))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Format JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
