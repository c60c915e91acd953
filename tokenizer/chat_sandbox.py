"""Render chat templates in Jinja's sandbox, with the helper functions of transformers.

A template is a program of a checkpoint. The sandbox keeps it from everything but its variables. The text that it writes
has a maximum length, and its loops and calls a maximum number; its memory is not limited.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokenizer.chat_templates import ChatTemplate

MAX_CHARACTERS = 1 << 24
"""Maximum length of the text that a template writes."""

MAX_STEPS = 1 << 20
"""Maximum number of items that all loops of a rendering go through, and of calls."""

MAX_ERROR_CHARACTERS = 1000
"""Longer errors are cut."""

_STEPS_LEFT: ContextVar[Iterator[int]] = ContextVar("steps_left")

_GENERATION_MARKERS = ("_generation_start", "_generation_end")
"""Variables that `{% generation %}` writes around its contents."""


def render_template(
    template: ChatTemplate, variables: Mapping[str, Any], now: datetime, generation_markers: tuple[str, str] = ("", "")
) -> str:
    """Render a template with these variables, which are JSON values, and its special tokens.

    Args:
        now: the time that `strftime_now` formats.
        generation_markers: texts that are inserted before and after what `{% generation %}` encloses.

    Raises:
        ValueError: the template is invalid, raises an exception, does something forbidden, or writes or does too much.
    """
    context = {
        "strftime_now": now.strftime,
        **template.tokens,
        **variables,
        **dict(zip(_GENERATION_MARKERS, generation_markers, strict=True)),
    }
    pieces: list[str] = []
    size = 0
    _STEPS_LEFT.set(iter(range(MAX_STEPS)))
    try:
        for piece in _compile_template(template.source).generate(context):
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
        return _quote(f"{type(error).__name__}: {error}") + "; do the messages match it?"
    number = getattr(error, "lineno", None)
    return _quote(str(error.message)) + ("" if number is None else f" (line {number})")


def _quote(message: str) -> str:
    """One line without control characters, of limited length."""
    words = " ".join(message[:MAX_ERROR_CHARACTERS].split())
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in words)


class _CountingCodeGenerator(CodeGenerator):
    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        counter = nodes.EnvironmentAttribute("count_items")
        node.iter = nodes.Call(counter, [node.iter], [], None, None, lineno=node.lineno)
        super().visit_For(node, frame)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with a maximum number of steps."""

    code_generator_class = _CountingCodeGenerator

    def count_items(self, items: Iterable[Any]) -> Iterator[Any]:
        """Iterate over the items of a loop."""
        for item in items:
            _count_step()
            yield item

    def call(self, *args: Any, **kwargs: Any) -> Any:
        _count_step()
        return super().call(*args, **kwargs)


def _count_step() -> None:
    if next(_STEPS_LEFT.get(), None) is None:
        raise SecurityError(f"it takes more than {MAX_STEPS:,} steps of loops and calls")


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
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
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
