"""The page at ``/`` in a real browser, at a real server."""

from __future__ import annotations

import json
import os
import time
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.image_chats import BLUE, RED, image_part, to_data_url
from tests.operate.chromium import Page, chromium
from tests.unit.serving.http.conftest import RunningServer, StartServer

pytestmark = pytest.mark.operate

HOSTILE = "<img src=x onerror=alert(1)></p> \u202eevil " + "W" * 50
PICTURES = os.environ.get("PAGE_PICTURES")
"""A folder for pictures of the page, to look at."""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("browser")) as page:
        yield page


def wait_for(page: Page, expression: str) -> Any:
    """Wait until an expression of JavaScript is true; returns it."""
    deadline = time.monotonic() + 30
    while not (value := page.evaluate(expression)):
        assert time.monotonic() < deadline, (expression, page.evaluate("document.body.innerText"), page.problems())
        time.sleep(0.02)
    return value


def open_page(page: Page, server: RunningServer, width: int = 1280, *, dark: bool = False) -> None:
    page.open(f"http://127.0.0.1:{server.port}/", width, 900, dark=dark)
    wait_for(page, "document.getElementById('model').value || !document.getElementById('unlock').hidden")


def set_value(page: Page, name: str, value: str) -> None:
    page.evaluate(f"document.getElementById({json.dumps(name)}).value = {json.dumps(value)}")


def click(page: Page, name: str) -> None:
    page.evaluate(f"document.getElementById({json.dumps(name)}).click()")


def text_of(page: Page, name: str) -> str:
    text: str = page.evaluate(f"document.getElementById({json.dumps(name)}).textContent")
    return text


def run(page: Page) -> None:
    click(page, "run")
    wait_for(page, "document.getElementById('state').textContent.startsWith('Done') || !error.hidden")
    assert page.evaluate("error.hidden"), text_of(page, "error")


def check_layout(page: Page, width: int, name: str) -> None:
    """Nothing is wider than the window, everything that can be used has a name, and the console is silent."""
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    unnamed = page.evaluate(
        "[...document.querySelectorAll('input, textarea, select, button')].filter(item => !item.labels?.length"
        " && !item.getAttribute('aria-label') && !item.textContent.trim()).map(item => item.id)"
    )
    assert unnamed == [] and page.problems() == []
    if PICTURES:
        page.screenshot(Path(PICTURES) / f"{name}.png", whole=True)


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_a_prompt_is_continued(page: Page, server: RunningServer, width: int, dark: bool) -> None:
    open_page(page, server, width, dark=dark)
    page.evaluate("document.querySelector('details').open = true")
    set_value(page, "prompt", f"the cat {HOSTILE}")
    for name, value in {"max_tokens": "24", "seed": "3", "temperature": "1", "denoising_steps": "4"}.items():
        set_value(page, f"set-{name}", value)
    page.evaluate(
        "window.frames_ = []; new MutationObserver(() => frames_.push(canvas.querySelectorAll('.mask').length))"
        ".observe(canvas, { childList: true })"
    )
    run(page)
    masks = page.evaluate("frames_")
    assert max(masks) > 0 and masks[-1] == 0 and len(set(masks)) > 2, "unmasking is shown"
    fields = {"max_tokens": 24, "seed": 3, "temperature": 1, "denoising_steps": 4}
    _, _, answer = server.request("POST", "/v1/completions", {"prompt": f"the cat {HOSTILE}", **fields})
    assert text_of(page, "canvas") == f"the cat {HOSTILE}" + answer["choices"][0]["text"]
    names, values = (
        page.evaluate(f"[...facts.querySelectorAll('{tag}')].map(item => item.textContent)") for tag in ("dt", "dd")
    )
    facts = dict(zip(names, values, strict=True))
    assert (facts["tokens"], facts["forwards"]) == ("24", str(answer["choices"][0]["num_forwards"]))
    assert page.requests()[0].endswith("/") and all(server.url[:-3] in address for address in page.requests())
    check_layout(page, width, f"prompt-{width}-{'dark' if dark else 'light'}")


def test_masked_spans_are_filled(page: Page, server: RunningServer) -> None:
    open_page(page, server, 390)
    click(page, "tab-infill")
    set_value(page, "text", "the cat [[4]] the mat")
    page.evaluate("text.setSelectionRange(0, 0)")
    set_value(page, "span-length", "3")
    click(page, "insert")
    assert page.evaluate("text.value") == "[[3]]the cat [[4]] the mat"
    set_value(page, "set-seed", "5")
    run(page)
    body = {"segments": [3, "the cat ", 4, " the mat"], "seed": 5}
    _, _, answer = server.request("POST", "/v1/infill", body)
    assert text_of(page, "canvas") == answer["choices"][0]["text"]
    assert (
        page.evaluate("[...canvas.querySelectorAll('.filled')].map(x => x.textContent)")
        == answer["choices"][0]["holes"]
    )
    set_value(page, "text", "no span")
    click(page, "run")
    assert "Insert a masked span first" in text_of(page, "error")
    check_layout(page, 390, "infill-390")


def test_a_conversation(page: Page, server: RunningServer) -> None:
    open_page(page, server)
    click(page, "tab-chat")
    messages: list[dict[str, str]] = []
    for text in (HOSTILE, "the dog"):
        set_value(page, "message", text)
        set_value(page, "set-seed", "1")
        set_value(page, "set-max_tokens", "8")
        run(page)
        messages.append({"role": "user", "content": text.strip()})
        body = {"messages": messages, "seed": 1, "max_tokens": 8}
        _, _, answer = server.request("POST", "/v1/chat/completions", body)
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    shown = page.evaluate("[...document.querySelectorAll('#messages .message')].map(x => x.lastChild.textContent)")
    assert shown == [message["content"] for message in messages]
    check_layout(page, 1280, "chat-1280")
    click(page, "clear")
    assert page.evaluate("document.querySelectorAll('#messages .message').length") == 0


def add_file(page: Page, file: bytes, kind: str, *, drops: bool) -> None:
    """Drop a file on the page, or choose it."""
    content = f"Uint8Array.from(atob('{b64encode(file).decode()}'), character => character.charCodeAt(0))"
    page.evaluate(
        f"window.files_ = new DataTransfer(); files_.items.add(new File([{content}], 'file', {{ type: '{kind}' }}))"
    )
    if drops:
        for name in ("dragover", "drop"):
            page.evaluate(
                f"document.body.dispatchEvent(new DragEvent('{name}', {{ dataTransfer: files_, bubbles: true }}))"
            )
    else:
        page.evaluate(
            "{ const field = document.getElementById('picture-files'); field.files = files_.files;"
            " field.dispatchEvent(new Event('change')); }"
        )


def test_pictures_of_a_conversation(page: Page, image_server: RunningServer) -> None:
    """One is chosen and removed, one is dropped; it stays in the conversation and is sent with its later turns."""
    open_page(page, image_server)
    add_file(page, RED, "image/png", drops=True)
    wait_for(page, "pictures.children.length === 1")
    assert page.evaluate("document.getElementById('tab-chat').ariaSelected") == "true"
    assert not page.evaluate("request.classList.contains('dropping')")
    add_file(page, BLUE, "image/png", drops=False)
    wait_for(page, "pictures.children.length === 2")
    page.evaluate("pictures.children[0].click()")
    messages: list[dict[str, Any]] = []
    for content in ([image_part(BLUE), {"type": "text", "text": "the cat"}], "the dog"):
        set_value(page, "message", content if isinstance(content, str) else content[1]["text"])
        set_value(page, "set-seed", "1")
        set_value(page, "set-max_tokens", "8")
        run(page)
        messages.append({"role": "user", "content": content})
        body = {"messages": messages, "seed": 1, "max_tokens": 8}
        _, _, answer = image_server.request("POST", "/v1/chat/completions", body)
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        assert text_of(page, "canvas") == messages[-1]["content"] and page.evaluate("pictures.children.length") == 0
    shown = page.evaluate("[...document.querySelectorAll('#messages .message')].map(x => x.lastChild.textContent)")
    assert shown == ["the cat", messages[1]["content"], "the dog", messages[3]["content"]]
    [source] = page.evaluate("[...document.querySelectorAll('#messages img')].map(x => x.src)")
    assert source == to_data_url(BLUE) and page.evaluate("document.querySelector('#messages img').naturalWidth") == 24
    check_layout(page, 1280, "pictures-1280")
    add_file(page, b"text", "text/plain", drops=True)
    wait_for(page, "pictures.children.length === 1")
    click(page, "run")
    wait_for(page, "!error.hidden")
    assert "messages[4].content[0]" in text_of(page, "error")
    click(page, "clear")
    assert page.evaluate("pictures.children.length + document.querySelectorAll('#messages img').length") == 0


def test_a_model_without_vision_takes_no_pictures(page: Page, server: RunningServer) -> None:
    open_page(page, server)
    assert page.evaluate("document.getElementById('picture-field').hidden")
    add_file(page, RED, "image/png", drops=True)
    assert page.evaluate("pictures.children.length") == 0 and text_of(page, "tab-prompt") == "Prompt"
    assert page.evaluate("document.getElementById('tab-prompt').ariaSelected") == "true"


def test_stop_frees_the_server(page: Page, server: RunningServer) -> None:
    open_page(page, server)
    set_value(page, "set-max_tokens", "200")
    click(page, "run")
    wait_for(page, "canvas.querySelector('.token') !== null")
    click(page, "stop")
    wait_for(page, "document.getElementById('state').textContent === 'Stopped.'")
    server.wait_until_idle()
    assert page.evaluate("document.getElementById('stop').disabled") and page.evaluate("error.hidden")


def test_errors_and_keys(page: Page, start_server: StartServer) -> None:
    server = start_server(keys=("secret",))
    open_page(page, server)
    assert not page.evaluate("unlock.hidden")
    set_value(page, "key", "wrong")
    page.evaluate("unlock.requestSubmit()")
    wait_for(page, "error.textContent.includes('does not know this key')")
    set_value(page, "key", "secret")
    page.evaluate("unlock.requestSubmit()")
    wait_for(page, "document.getElementById('model').value === 'tiny'")
    assert page.evaluate("unlock.hidden") and page.evaluate("error.hidden")
    set_value(page, "set-remasking_strategy", "nonsense")
    click(page, "run")
    wait_for(page, "!error.hidden")
    assert "nonsense" in text_of(page, "error")


def test_tabs_are_used_by_the_keyboard(page: Page, server: RunningServer) -> None:
    open_page(page, server)
    page.evaluate("document.getElementById('tab-prompt').focus()")
    for key, selected in (("ArrowRight", "tab-chat"), ("ArrowRight", "tab-infill"), ("ArrowRight", "tab-prompt")):
        for kind in ("keyDown", "keyUp"):
            page.call("Input.dispatchKeyEvent", type=kind, key=key)
        assert page.evaluate("document.activeElement.id") == selected
        assert page.evaluate("document.querySelector('[aria-selected=\"true\"]').id") == selected
