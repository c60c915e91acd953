"""``response_format`` and ``structured_outputs`` over a socket: answers conform, and errors name the field."""

from __future__ import annotations

import json
import re
import threading
import time
from typing import Any

import openai
import pytest

from diffusionlm.inference.constraints.compiler import ConstraintCompiler
from tests.unit.serving.http.conftest import RunningServer, StartServer

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


def test_json_schema_with_the_client(server: RunningServer) -> None:
    client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, _strict_response_validation=True)
    messages: Any = [{"role": "user", "content": "a pet"}]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, response_format=FORMAT, max_completion_tokens=32, n=2, extra_body=stops(server)
    )
    for choice in answer.choices:
        value = json.loads(choice.message.content or "")
        assert list(value) == ["cat", "mats"] and len(value["cat"]) <= 6 and 0 <= value["mats"] <= 9
        assert choice.finish_reason == "stop"
    chunks = client.chat.completions.create(
        model="tiny", messages=messages, response_format=FORMAT, max_completion_tokens=32, stream=True,
        extra_body=stops(server),
    )  # fmt: skip
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.choices[0].message.content
    answer = client.chat.completions.create(
        model="tiny",
        messages=messages,
        response_format={"type": "json_object"},
        max_tokens=20,
        extra_body=stops(server),
    )
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


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


def test_several_prompts_with_a_constraint_are_not_healed(server: RunningServer) -> None:
    prompts = ["the ca", "the cat sa"]
    body = {"prompt": prompts, "max_tokens": 6, "structured_outputs": {"regex": "[ab ]*"}, **stops(server)}
    answers = [
        server.request("POST", "/v1/completions", {**body, **fields})[2]["choices"]
        for fields in ({}, {"token_healing": False})
    ]
    assert answers[0] == answers[1] and len(answers[0]) == 2


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


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs", "structured_outputs: regex: the regular"),
        ({"structured_outputs": {"grammar": "a"}}, "structured_outputs", "it has grammar"),
        ({"structured_outputs": [{"regex": "a"}]}, "structured_outputs", "expected an object"),
        ({"structured_outputs": {"regex": "a"}, "response_format": FORMAT}, "structured_outputs", "exclude each other"),
        ({"structured_outputs": {"regex": "(a|b)*a(a|b){30}"}}, "structured_outputs", "the constraint is too large"),
        ({"response_format": {"type": "grammar"}}, "response_format.type", "'json_object' or 'json_schema'"),
        ({"response_format": "text"}, "response_format", "dictionary"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema, an object with a schema"),
        ({"response_format": {"type": "json_object", "a": 1}}, "response_format.a", "is not supported"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "number", "minimum": 1}}}},
         "response_format", "the schema: minimum is not supported here"),
        ({"structured_outputs": {"choice": ["a" * 100]}}, "structured_outputs", "needs at least 100 tokens"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs", "no text of exactly 8 tokens fits"),
    ],
)  # fmt: skip
def test_errors_name_the_field(server: RunningServer, fields: dict[str, Any], param: str, message: str) -> None:
    status, _, body = server.request("POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": 8, **fields})
    assert (status, body["error"]["param"]) == (400, param)
    assert message in body["error"]["message"]


def test_errors_of_holes(server: RunningServer) -> None:
    for constraints, message in (
        ([{"regex": "a"}], "has 1 entries for 2 masked spans"),
        ([None, {"choice": ["mat"]}], "masked span 2: no text of exactly 9 tokens"),
    ):
        body = {"segments": ["the", 2, "on", 9], "structured_outputs": constraints}
        status, _, answer = server.request("POST", "/v1/infill", body)
        assert (status, answer["error"]["param"]) == (400, "structured_outputs")
        assert message in answer["error"]["message"]


def test_constraints_of_a_request_are_limited_together(start_server: StartServer) -> None:
    """Equal ones count once; the message names the limit."""
    server = start_server(max_constraints=3, max_constraint_states=40)

    def ask(*patterns: str | None) -> tuple[int, str]:
        segments = [item for _ in patterns for item in ("the ", 2)]
        holes = [None if pattern is None else {"regex": pattern} for pattern in patterns]
        status, _, body = server.request("POST", "/v1/infill", {"segments": segments, "structured_outputs": holes})
        return status, "" if status == 200 else body["error"]["message"]

    assert ask(*["[a-d]*", "[e-h]*", "[i-l]*"] * 8, None) == (200, "")
    status, message = ask("a*", "b*", None, "c*", "d*", "d*")
    assert status == 400 and "4 different constraints" in message and "serve.max_constraints" in message
    assert ask("[a-z]{0,30}") == (200, "")
    status, message = ask("[a-z]{0,30}", "[a-z ]{0,29}")
    assert status == 400 and "61 states or more" in message and "serve.max_constraint_states" in message


@pytest.mark.parametrize(
    "constraint",
    [
        {"regex": "[a-z ]{0,60}"},
        {"choice": ["a" * 30, "b" * 30]},
        {"json": {"type": "string", "maxLength": 50}},
        {"json_object": True},
    ],
)
def test_the_states_of_any_constraint_are_limited(start_server: StartServer, constraint: dict[str, Any]) -> None:
    server = start_server(max_constraint_states=40)
    status, _, body = server.request("POST", "/v1/completions", {"prompt": PROMPT, "structured_outputs": constraint})
    assert (status, body["error"]["param"]) == (400, "structured_outputs")
    words = (f"structured_outputs: {next(iter(constraint))}: ", "more than 40 states", "serve.max_constraint_states")
    assert all(word in body["error"]["message"] for word in words), body


@pytest.mark.parametrize("has_keys", [True, False])
def test_constraints_take_turns_by_key(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, has_keys: bool
) -> None:
    """Without keys the owner is the address of the client. What it means is in the tests of `DaemonThreads`."""
    keys = ("a-first-key-of-sixteen", "a-second-key-of-sixteen") if has_keys else ()
    server = start_server(keys=keys)
    owners: list[str] = []

    async def note_turn(function: Any, owner: str) -> Any:
        owners.append(owner)
        return function()

    monkeypatch.setattr(server.service.constraint_threads, "run", note_turn)
    for key in (0, 0, -1):
        body = {"prompt": PROMPT, "max_tokens": 1, "structured_outputs": {"regex": "a"}}
        headers = {"Authorization": f"Bearer {keys[key]}"} if keys else {}
        server.request("POST", "/v1/completions", body, headers)
    first, second, other = owners
    assert first == second and (first != other) == has_keys and (has_keys or first == "127.0.0.1")


def test_constraints_that_are_compiled_hold_up_nobody_else(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server(max_requests=4, max_waiting=5)
    entered, release = threading.Semaphore(0), threading.Event()

    compile_constraint = ConstraintCompiler.compile_structured_outputs

    def wait(self: ConstraintCompiler, value: object) -> Any:
        entered.release()
        assert release.wait(30)
        return compile_constraint(self, value)

    monkeypatch.setattr(ConstraintCompiler, "compile_structured_outputs", wait)
    results: list[int] = []

    def ask(structured_outputs: Any) -> None:
        body = {"prompt": PROMPT, "max_tokens": 1, "structured_outputs": structured_outputs}
        results.append(server.request("POST", "/v1/completions", body)[0])

    def start(count: int) -> list[threading.Thread]:
        threads = [threading.Thread(target=ask, args=({"regex": "a"},)) for _ in range(count)]
        for thread in threads:
            thread.start()
        return threads

    threads = start(8)
    while server.service.num_active < 8:
        time.sleep(0.001)
    assert entered.acquire(timeout=30)
    ask(None)
    assert results == [200]
    threads += start(1)
    while server.service.num_active < 9:
        time.sleep(0.001)
    ask(None)
    assert results == [200, 429], "their bodies are in memory"
    release.set()
    for thread in threads:
        thread.join(30)
    assert results == [200, 429, *[200] * 9] and server.service.num_active == 0
