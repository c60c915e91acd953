"""The page at ``/``: its headers, and what must not be in it."""

from __future__ import annotations

import base64
import hashlib
import re

from config.generation import GenerationConfig
from diffusionlm.inference.strategies import STRATEGIES
from diffusionlm.serving.http.app import load_page
from diffusionlm.serving.http.completions import InfillBody
from tests.unit.serving.http.conftest import RunningServer, StartServer


def test_it_needs_no_key_and_allows_only_itself(start_server: StartServer) -> None:
    server: RunningServer = start_server(keys=("secret",))
    status, headers, text = server.request("GET", "/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for name in ("script", "style"):
        content = text.split(f"<{name}>")[1].split(f"</{name}>")[0]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{name}-src"] == f"'sha256-{digest}'"
    assert headers["x-content-type-options"] == "nosniff" and "x-request-id" in headers
    assert server.request("GET", "/v1/models")[0] == 401
    assert server.request("POST", "/", b"")[0] == 405


def test_it_loads_nothing_and_never_takes_text_for_html() -> None:
    text = bytes(load_page().body).decode()
    assert not re.findall(r"https?://|//[a-z]|@import|url\(", text.replace('"use strict"', ""))
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\bstyle=|\bon[a-z]+=", text)


def test_its_settings_are_fields_of_requests() -> None:
    text = bytes(load_page().body).decode()
    names = re.findall(r'^    \["([a-z_]+)", "', text, re.MULTILINE)
    assert len(names) == 8
    assert set(names) <= GenerationConfig.model_fields.keys() | InfillBody.model_fields.keys() | {"max_tokens"}
    [example] = re.findall(r'placeholder: "([a-z_]+)"', text)
    assert example in STRATEGIES
