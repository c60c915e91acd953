"""A program that renders chat templates, which are untrusted, with limits of memory, CPU time and output.

`tokenizer.chat_process` starts it. It reads requests and writes replies, each one JSON object on one line of UTF-8:
``{"source": Jinja, "variables": {...}, "now": time, "generation_markers": [...]}`` is answered by ``{"text": ...}`` or
``{"error": ...}``, or by the end of the process if the template exceeds the memory or the CPU time.

The limits are those of the operating system, and therefore complete: they hold for whatever a template calls, for the
constants that Jinja computes while it compiles, and for the text of an error. Bounds on single operations would have to
cover every filter, method, operator and comparison of Jinja and Python, and a comparison of nested lists alone can take
forever.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_CHARACTERS = 1 << 24
"""Maximum length of the text that a template writes."""

MAX_ERROR_CHARACTERS = 1000
"""Longer errors are cut."""


def main() -> None:
    """Answer the requests on standard input. Arguments: the address space in bytes, and the CPU seconds per request."""
    memory_bytes, cpu_seconds = int(sys.argv[1]), float(sys.argv[2])
    # The signal at the end of the CPU time ends the process, also within a single operation.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    if sys.platform != "darwin":  # macOS refuses to limit the address space
        _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
        limit = memory_bytes if hard_limit == resource.RLIM_INFINITY else min(memory_bytes, hard_limit)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        _answer_requests(cpu_seconds)
    except MemoryError:
        os._exit(os.EX_OSERR)  # `tokenizer.chat_process` tells the reason
    except BrokenPipeError:
        os._exit(0)  # the other process ended


def _answer_requests(cpu_seconds: float) -> None:
    source, template = None, None
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        request = json.loads(line.decode("utf-8", "surrogatepass"))
        try:
            if template is None or request["source"] != source:
                source = template = None  # frees the memory of the previous template
                template = compile_template(request["source"])
                source = request["source"]
            template.environment.generation_markers = request["generation_markers"]  # type: ignore[attr-defined]
            reply = {"text": render(template, request["variables"], datetime.fromisoformat(request["now"]))}
        except MemoryError:
            raise
        except Exception as error:  # a template is a program, which may raise anything
            reply = {"error": describe_error(error)}
        data = json.dumps(reply, ensure_ascii=False).encode("utf-8", "surrogatepass")
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(data + b"\n")
        sys.stdout.buffer.flush()


def render(template: Template, variables: Mapping[str, Any], now: datetime) -> str:
    """Render a template; `strftime_now` formats `now`."""
    pieces: list[str] = []
    size = 0
    for piece in template.generate({"strftime_now": now.strftime, **variables}):
        size += len(piece)
        if size > MAX_CHARACTERS:
            raise SecurityError(f"it writes more than {MAX_CHARACTERS:,} characters")
        pieces.append(piece)
    return "".join(pieces)


def describe_error(error: Exception) -> str:
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
    """`{% generation %}...{% endgeneration %}`, which marks the assistant's text; renders its contents between the
    markers of the request."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_contents"), [], [], body).set_lineno(line)

    def _contents(self, caller: Macro) -> str:
        start, end = self.environment.generation_markers  # type: ignore[attr-defined]
        return f"{start}{caller()}{end}"


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


def compile_template(source: str) -> Template:
    """Compile a template with the helper functions of transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
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


if __name__ == "__main__":
    main()
