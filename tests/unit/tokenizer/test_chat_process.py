"""Chat templates that would take any memory or time, and the process that renders them."""

import gc
import os
import resource
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tokenizer import CHAT_TEMPLATES, ChatTemplate, render_chat
from tokenizer.chat_process import TemplateProcess, run_trusted_template

MEMORY_BYTES = 1 << 28
NOW = datetime(2026, 1, 2)
DOUBLING = "{{% set n = namespace(x={}) %}}{{% for i in range(99) %}}{{% set n.x = {} %}}{{% endfor %}}{}"
LONG_TEXT = "{% set a = text * 10000000 %}"

# A filter, a method, a format, an operator, a constant that is computed at compilation, and loops over long texts.
TOO_LARGE = (
    "{{ 'x'|center(10 ** 10) }}",
    "{{ text.ljust(10 ** 10) }}",
    "{{ '{:>{}}'.format(text, 10 ** 10) }}",
    "{{ 10 ** 10 * [1] }}",
    "{{ 'x' * 10 ** 10 }}",
    "{{ 1|tojson(indent=10 ** 10) }}{{ [1]|tojson(indent=10 ** 10) }}",
    LONG_TEXT + "{{ a|replace('x', a) }}",
    LONG_TEXT + "{% macro f() %}{% for i in range(36) %}{{ a }}{% endfor %}{% endmacro %}{{ f()|length }}",
    DOUBLING.format("'x'", "n.x + n.x", ""),
    DOUBLING.format("[1]", "n.x + n.x", ""),
)

TOO_SLOW = (
    "{{ [1]|slice(10 ** 10)|list }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 9 ** (9 ** 9) > 1 }}",
    "{% set n = namespace(a=[], b=[]) %}{% for i in range(99) %}{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}"
    "{% endfor %}{{ n.a == n.b }}",
)


@pytest.fixture(scope="module")
def little_memory() -> TemplateProcess:
    return TemplateProcess(MEMORY_BYTES, cpu_seconds=600.0)


@pytest.fixture(scope="module")
def little_time() -> TemplateProcess:
    return TemplateProcess(MEMORY_BYTES, cpu_seconds=0.25)


@pytest.mark.parametrize("source", TOO_LARGE)
def test_memory_is_limited(source: str, little_memory: TemplateProcess) -> None:
    with pytest.raises(ValueError, match=r"cannot be applied: it needs more than 256 MiB of memory$"):
        little_memory.render(source, {"text": "x"}, NOW)
    assert little_memory.render("{{ text }}", {"text": "y"}, NOW) == "y"


@pytest.mark.parametrize("source", TOO_SLOW)
def test_cpu_time_is_limited(source: str, little_time: TemplateProcess) -> None:
    with pytest.raises(ValueError, match=r"cannot be applied: it takes more than 0\.25 seconds of CPU time$"):
        little_time.render(source, {"text": "x"}, NOW)
    assert little_time.render("{{ text }}", {"text": "y"}, NOW) == "y"


def list_children() -> set[int]:
    return {int(number) for number in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()}


def start_process() -> tuple[TemplateProcess, int]:
    """A process that has rendered something, and its id."""
    others = list_children()
    process = TemplateProcess(MEMORY_BYTES, cpu_seconds=600.0)
    assert process.render("{{ text }}", {"text": "x"}, NOW) == "x"
    [child] = list_children() - others
    return process, child


def test_one_process_renders_all_templates_and_ends_with_its_owner() -> None:
    process, child = start_process()
    assert resource.prlimit(child, resource.RLIMIT_AS) == (MEMORY_BYTES, MEMORY_BYTES)
    assert os.getsid(child) != os.getsid(0), "Ctrl-C would end it"
    for text in ("y", "\ud800 \ud83d\ude00", "\u2028\r\n"):
        assert process.render("{{ text }} {{ strftime_now('%Y') }}", {"text": text}, NOW) == f"{text} 2026"
    assert child in list_children()
    del process
    gc.collect()
    assert child not in list_children()


def test_a_process_that_was_killed_is_replaced() -> None:
    process, child = start_process()
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert process.render("{{ text }}", {"text": "y"}, NOW) == "y"
    assert child not in list_children()


def test_ctrl_c_ends_a_rendering() -> None:
    """Its reply, if it ever came, would answer the next request."""
    process, child = start_process()
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            process.render(TOO_SLOW[1], {"text": "x"}, NOW)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)
    assert child not in list_children()
    assert process.render("{{ text }}", {"text": "y"}, NOW) == "y"


def test_threads_share_a_process() -> None:
    process, child = start_process()
    texts = [str(number) for number in range(100)]
    with ThreadPoolExecutor(8) as pool:
        results = pool.map(lambda text: process.render("{{ text }}", {"text": text}, NOW), texts)
        assert list(results) == texts
    assert child in list_children()


def test_a_fork_has_a_process_of_its_own() -> None:
    """Workers of a data loader, for example."""
    chat = [{"role": "user", "content": "x"}]
    assert render_chat("{{ messages[0].content }}", chat, add_generation_prompt=False) == "x"
    own_children = list_children()
    fork = os.fork()
    if not fork:
        text = render_chat("{{ messages[0].content }}y", chat, add_generation_prompt=False)
        gc.collect()
        os._exit(0 if text == "xy" and len(list_children()) == 1 else 1)
    _, status = os.waitpid(fork, 0)
    assert status == 0
    assert render_chat("{{ messages[0].content }}z", chat, add_generation_prompt=False) == "xz"
    assert list_children() == own_children


RENDERED_CHATS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "hi"}],
    [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": " <b>&amp;\ud800 \u00e9\u2028 {{ 1 }} "},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes", "reasoning_content": "so"},
        {"role": "user", "content": ""},
    ],
    [{"role": "wizard", "content": "abra"}],
    [{"role": "user", "content": ["no string"]}],
    [{"role": "user"}],
    [],
)


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_built_in_templates_are_rendered_in_this_process_with_the_same_result(
    name: str, little_memory: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def result(render: Callable[..., str], *arguments: Any) -> str:
        try:
            return render(*arguments)
        except ValueError as error:
            return f"error: {error}"

    template, kinds = CHAT_TEMPLATES[name], set()
    for messages in RENDERED_CHATS:
        for extra in ({}, {"enable_thinking": False}, {"tools": [{"name": "f"}]}, {"add_generation_prompt": True}):
            variables = {**template.tokens, "messages": messages, **extra}
            own = result(run_trusted_template, template.source, variables, NOW)
            assert own == result(little_memory.render, template.source, variables, NOW)
            kinds.add(own.startswith("error: the chat template cannot be applied: "))
    assert kinds == {True, False}

    def refuse(*arguments: Any) -> str:
        raise AssertionError("started a process")

    monkeypatch.setattr("tokenizer.chat.run_template", refuse)
    assert "hi" in render_chat(name, RENDERED_CHATS[0], add_generation_prompt=True)
    with pytest.raises(AssertionError, match="started a process"):
        render_chat(ChatTemplate(template.source + "{# not built in #}"), RENDERED_CHATS[0], add_generation_prompt=True)
