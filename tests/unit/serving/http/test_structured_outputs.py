"""``response_format`` and ``structured_outputs`` over a socket: answers conform, and errors name the field."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import openai
import pytest

from diffusionlm.inference.constraints.compiler import ConstraintCompiler
from tests.unit.serving.http.conftest import RunningServer, StartServer, wait_until

SCHEMA = {
    "type": "object",
    "properties": {"cat": {"type": "string", "maxLength": 6}, "mats": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["cat", "mats"],
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "pet", "strict": True, "schema": SCHEMA}}
PROMPT = "the cat sat on"


def stops(server: RunningServer) -> dict[str, Any]:
    """A random model would hardly ever stop by itself, and these tests do not wait for it to fill every position."""
    return {"stop_token_ids": [server.tokenizer.eos_token_id], "temperature": 1.0, "seed": 3}


def test_json_schema_with_the_client(server: RunningServer, client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "messages": [{"role": "user", "content": "a pet"}], "max_completion_tokens": 32}
    options["extra_body"] = stops(server)
    answer = client.chat.completions.create(**options, response_format=FORMAT, n=2)
    for choice in answer.choices:
        value = json.loads(choice.message.content or "")
        assert list(value) == ["cat", "mats"] and len(value["cat"]) <= 6 and 0 <= value["mats"] <= 9
        assert choice.finish_reason == "stop"
    chunks = client.chat.completions.create(**options, response_format=FORMAT, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.choices[0].message.content
    answer = client.chat.completions.create(**options, response_format={"type": "json_object"})
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


def test_an_answer_that_fills_all_positions_is_whole(server: RunningServer) -> None:
    """Clients raise an error if a structured answer ends with "length"."""
    schema = {"type": "object", "properties": {"tags": {"items": {"type": "string"}}}, "required": ["tags"]}
    body: dict[str, Any] = {"max_tokens": 24, "stop_token_ids": [], "temperature": 1.0, "seed": 3}
    body |= {"guided_json": schema, "response_format": {"type": "text"}}  # which asks for nothing
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
    for path, prompt in (("chat/completions", chat), ("completions", {"prompt": PROMPT})):
        status, _, answer = server.request("POST", f"/v1/{path}", body | prompt)
        assert status == 200, answer
        [choice] = answer["choices"]
        assert json.loads(choice["message"]["content"] if prompt is chat else choice["text"]).keys() == {"tags"}
        assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("stop", 24)


@pytest.mark.parametrize(("prompt", "healing"), [("the cat sat ", True), ("the ca", True), ("the ca", False)])
def test_choices_go_on_behind_the_prompt(server: RunningServer, healing: bool, prompt: str) -> None:
    """Also where the first new token repeats the end of the prompt."""
    body = {"prompt": prompt, "token_healing": healing, "max_tokens": 16, "logprobs": 2, **stops(server)}
    for structured, pattern in (
        ({"choice": ["on the mat.", "flat, and"]}, r"on the mat\.|flat, and"),
        ({"regex": "(t[aeo]t){2}"}, "(t[aeo]t){2}"),
        ({"json": {"const": [1, 2]}}, re.escape("[1, 2]")),
    ):
        status, _, answer = server.request("POST", "/v1/completions", {**body, "structured_outputs": structured})
        assert status == 200, answer
        assert re.fullmatch(pattern, answer["choices"][0]["text"])


def test_healing_takes_no_token_from_an_answer(server: RunningServer) -> None:
    """A token that repeats the end of the prompt would be a third one."""
    body = {"prompt": "the cat sa", "max_tokens": 2, "structured_outputs": {"regex": "[!?]{2}"}, **stops(server)}
    body["stop_token_ids"] = []
    healed = server.request("POST", "/v1/completions", body)
    plain = server.request("POST", "/v1/completions", {**body, "token_healing": False})
    assert plain[0] == healed[0] == 200, (plain, healed)
    assert re.fullmatch("[!?]{2}", healed[2]["choices"][0]["text"])
    assert healed[2]["choices"] == plain[2]["choices"]


@pytest.mark.parametrize("healing", [True, False])
def test_each_hole_has_a_constraint(server: RunningServer, healing: bool) -> None:
    body = {
        "segments": ["the ", 3, 2, " ", 3, " on the ", 4, "."], "temperature": 1.0, "token_healing": healing,
        "structured_outputs": [{"regex": "[a-d ]*"}, {"choice": ["at", "it"]}, None, {"regex": "x.*"}],
    }  # fmt: skip
    status, _, answer = server.request("POST", "/v1/infill", body)
    assert status == 200, answer
    first, second, _, last = answer["choices"][0]["holes"]
    assert re.fullmatch("[a-d ]*", first) and second in ("at", "it") and last.startswith("x")
    suffix = {"prompt": PROMPT, "suffix": " mat", "max_tokens": 4, "structured_outputs": {"regex": "[xyz]*"}}
    status, _, answer = server.request("POST", "/v1/completions", {**suffix, "token_healing": healing})
    assert status == 200 and re.fullmatch("[xyz]{4,}", answer["choices"][0]["text"])


def test_limits_of_constraints_one_by_one_and_together(start_server: StartServer) -> None:
    """Equal ones count once; the message names the limit."""
    server = start_server(max_constraints=3, max_constraint_states=40)
    for constraint in ({"regex": "[a-z ]{0,60}"}, {"choice": ["a" * 30, "b" * 30]}, {"json_object": True}):
        body = {"prompt": PROMPT, "structured_outputs": constraint}
        error = server.request("POST", "/v1/completions", body)[2]["error"]
        words = (f"structured_outputs: {next(iter(constraint))}: ", "than 40 states", "serve.max_constraint_states")
        assert error["param"] == "structured_outputs" and all(word in error["message"] for word in words), error

    def ask(*patterns: str | None) -> tuple[int, str]:
        segments = [item for _ in patterns for item in ("the ", 2)]
        holes = [None if pattern is None else {"regex": pattern} for pattern in patterns]
        status, _, body = server.request("POST", "/v1/infill", {"segments": segments, "structured_outputs": holes})
        return status, "" if status == 200 else body["error"]["message"]

    assert ask(*["[a-d]*", "[e-h]*", "[i-l]*"] * 8, None) == (200, "")
    status, message = ask("a*", "b*", None, "c*", "d*", "d*")
    assert status == 400 and "different constraints = 4" in message and "serve.max_constraints" in message
    assert ask("[a-z]{0,30}") == (200, "")
    status, message = ask("[a-z]{0,30}", "[a-z ]{0,29}")
    assert status == 400 and "all spans = 61" in message and "serve.max_constraint_states" in message


def test_constraints_take_turns_by_key(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ("a-first-key-of-sixteen", "a-second-key-of-sixteen")
    server = start_server(keys=keys)
    owners: list[str] = []

    async def note_turn(function: Any, owner: str) -> Any:
        owners.append(owner)
        return function()

    monkeypatch.setattr(server.service.constraint_threads, "run", note_turn)
    for key in (keys[0], keys[0], keys[1]):
        body = {"prompt": PROMPT, "max_tokens": 1, "structured_outputs": {"regex": "a"}}
        server.request("POST", "/v1/completions", body, {"Authorization": f"Bearer {key}"})
    assert owners[0] == owners[1] != owners[2]


def test_constraints_that_are_compiled_hold_up_nobody_else(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server(max_requests=4, max_waiting=5)
    release = threading.Event()

    compile_constraint = ConstraintCompiler.compile_structured_outputs

    def wait(self: ConstraintCompiler, value: object) -> Any:
        assert release.wait(30)
        return compile_constraint(self, value)

    monkeypatch.setattr(ConstraintCompiler, "compile_structured_outputs", wait)
    results: list[int] = []

    def ask(structured_outputs: Any = None) -> None:
        body = {"prompt": PROMPT, "max_tokens": 1, "structured_outputs": structured_outputs}
        results.append(server.request("POST", "/v1/completions", body)[0])

    def has_active(count: int) -> bool:
        return server.service.num_active == count

    with ThreadPoolExecutor(9) as clients:
        for count, num_blocked in ((8, 8), (1, 9)):
            for _ in range(count):
                clients.submit(ask, {"regex": "a"})
            wait_until(partial(has_active, num_blocked))
            ask()
            wait_until(lambda: not server.engine._handles)
        assert results == [200, 429], "their bodies are in memory"
        release.set()
    assert results == [200, 429, *[200] * 9]
    server.wait_until_idle()
