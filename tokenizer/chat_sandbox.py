"""Run the Jinja source of a chat template, which is untrusted, in a sandbox."""

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_CHARACTERS = 1 << 26
"""Maximum length of the output of a template, and of a value that multiplication creates."""

MAX_RANGE_ITEMS = 100_000
"""Maximum number of items of all `range` calls of one rendering together."""

_LARGEST_EXPONENT = 64


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox of Jinja, which here also limits the size of products and powers."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and (abs(left) > MAX_CHARACTERS or abs(right) > _LARGEST_EXPONENT):
            raise SecurityError(f"{left} ** {right} is too large")
        for value, times in ((left, right), (right, left)):
            if operator == "*" and isinstance(value, str | list | tuple) and len(value) * times > MAX_CHARACTERS:
                raise SecurityError(f"a value of length {len(value)} times {times} is too long")
        return super().call_binop(context, operator, left, right)


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks the assistant's text; renders its contents."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_contents"), [], [], body).set_lineno(line)

    def _contents(self, caller: Macro) -> str:
        return str(caller())


class _Namespace(Namespace):
    """`namespace(...)` without attributes that begin with an underscore, such as Python's internals."""

    def __init__(*args: Any, **attributes: Any) -> None:
        for name in dict(*args[1:], **attributes):
            _check_name(name)
        Namespace.__init__(*args, **attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace may not have the attribute {name!r}")


def run_template(source: str, variables: Mapping[str, Any], now: datetime) -> str:
    """Render a template; `now` is the time that `strftime_now` formats.

    Raises:
        ValueError: it is invalid, raises an exception, does something forbidden, or exceeds a limit.
    """
    pieces: list[str] = []
    size = 0
    try:
        template = _compile_template(source)
        helpers = {"strftime_now": now.strftime, "range": _bounded_range()}
        for piece in template.generate({**helpers, **variables}):
            size += len(piece)
            if size > MAX_CHARACTERS:
                raise SecurityError(f"it writes more than {MAX_CHARACTERS:,} characters")
            pieces.append(piece)
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        location = "" if line is None else f" (line {line})"
        raise ValueError(f"the chat template cannot be applied: {error.message}{location}") from None
    except Exception as error:  # a template is a program, which may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"the chat template cannot be applied: {reason}; do the messages match it?") from None
    return "".join(pieces)


@lru_cache(maxsize=16)
def _compile_template(source: str) -> Template:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals.pop("lipsum")
    environment.globals |= {"raise_exception": _raise_exception, "dict": _make_dict, "namespace": _Namespace}
    return environment.from_string(source)


def _raise_exception(message: str) -> None:
    raise TemplateError(str(message))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Format JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _make_dict(*args: Any, **items: Any) -> dict[Any, Any]:
    return dict(*args, **items)


def _bounded_range() -> Callable[..., range]:
    remaining = MAX_RANGE_ITEMS

    def bounded(*args: int) -> range:
        nonlocal remaining
        numbers = range(*args)
        remaining -= len(numbers)
        if remaining < 0:
            raise SecurityError(f"its ranges have more than {MAX_RANGE_ITEMS:,} items together")
        return numbers

    return bounded
