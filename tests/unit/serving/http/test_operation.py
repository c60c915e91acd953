"""Limits, keys, disconnects, a full queue, a dead engine, the end."""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import openai
import pytest
from starlette.responses import Response

from diffusionlm.models.transformer import Transformer
from tests.conftest import MakeModel
from tests.unit.serving.http.conftest import NAME, RunningServer, StartServer, wait_until
from tests.unit.serving.model_gate import ModelGate

KEY, OTHER_KEY = "a-key-of-the-tests-1", "a-key-of-the-tests-2"
BODY = {"prompt": "the cat", "max_tokens": 4}


@pytest.fixture
def gate(served_model: Transformer, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelGate]:
    gate = ModelGate(served_model, monkeypatch)
    yield gate
    gate.open()


@pytest.fixture(scope="module")
def small(start_server: StartServer) -> RunningServer:
    """A server with keys and small limits."""
    return start_server(
        keys=(KEY, OTHER_KEY),
        max_body=2000,
        max_header=2000,
        header_timeout_seconds=0.2,
        body_timeout_seconds=0.2,
        max_requests=1,
        max_waiting=1,
    )


def send_raw(server: RunningServer, data: bytes, *, more: bytes = b"", pause: float = 0.0) -> tuple[int, Any]:
    """Send bytes, then one of ``more`` at a time; returns status and JSON of the response."""
    with server.connect() as connection:
        connection.sendall(data)
        try:
            for byte in more:
                time.sleep(pause)
                connection.sendall(bytes([byte]))
        except OSError:
            pass
        text = b""
        while chunk := connection.recv(1 << 16):
            text += chunk
    head, _, body = text.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def head(path: str = "/v1/completions", *lines: str, method: str = "POST") -> bytes:
    headers = [f"Authorization: Bearer {KEY}", "Content-Type: application/json", "Connection: close", *lines]
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


def test_keys(small: RunningServer) -> None:
    for path in ("/v1/models", "/metrics", "/nothing", "//", "/health/", "/v1/../health"):
        status, headers, body = small.request("GET", path)
        assert (status, body["error"]["code"]) == (401, "invalid_api_key") and "www-authenticate" in headers
    for value in (KEY, f"Basic {KEY}", f"Bearer {KEY}x", "Bearer ", f"Bearer {KEY[:-1]}", "Bearer \xff"):
        assert small.request("GET", "/v1/models", headers={"Authorization": value})[0] == 401
    assert small.request("GET", "/health")[0] == 200
    for key in (KEY, OTHER_KEY):
        assert [model.id for model in openai.OpenAI(base_url=small.url, api_key=key).models.list()] == [NAME]
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=small.url, api_key="wrong").models.list()


def test_keys_do_not_share_cached_texts(small: RunningServer) -> None:
    prompt = [token % 250 for token in range(40)]

    def num_cached(key: str) -> int:
        client = openai.OpenAI(base_url=small.url, api_key=key)
        usage = client.completions.create(model=NAME, prompt=prompt, max_tokens=2).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    assert [num_cached(key) for key in (KEY, KEY, OTHER_KEY, OTHER_KEY)] == [0, 32, 0, 32]


@pytest.mark.parametrize(
    ("data", "more", "status"),
    [
        (b"nonsense\r\n\r\n", b"", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nx: " + b"y" * 3000, b"", 400),
        (head("/health", "x: " + "y" * 3000, method="GET"), b"", 400),
        (head("/health", *["x: y"] * 400, method="GET"), b"", 400),
        (head("/health?" + "y" * 3000, method="GET"), b"", 400),
        (b"GET /health HT", b"", 408),
        (b"GET /health HT", b"TP/1.1\r\n" * 9, 408),
        (head("/v1/completions", "Content-Length: 20") + b"{", b"", 408),
        (head("/v1/completions", "Content-Length: 20") + b"{", b'"prompt": "a" ', 408),
        (head("/v1/completions", "Content-Length: 1000000000"), b"", 413),
        (head("/v1/completions", "Transfer-Encoding: chunked") + b"BB8\r\n" + b" " * 3000 + b"\r\n0\r\n\r\n", b"", 413),
        (head("/v1/completions", "Content-Length: 9" + "9" * 30), b"", 400),
        (head("/v1/completions"), b"", 400),
        (head("/v1/completions", "Transfer-Encoding: chunked") + b"2\r\n{}\r\n0\r\n\r\n", b"", 400),
        (head("/v1/completions", "Content-Length: 1000000000", "Expect: 100-continue"), b"", 413),
        (head("/v1/completions", "Content-Length: 5", "Transfer-Encoding: chunked") + b"0\r\n\r\n", b"", 400),
    ],
)
def test_bodies_and_headers(small: RunningServer, data: bytes, more: bytes, status: int) -> None:
    answer, body = send_raw(small, data, more=more, pause=0.03)
    assert answer == status and body["error"].keys() == {"message", "type", "param", "code"}
    small.wait_until_idle()


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"Content-Type": "text/plain"}, 415, "unsupported_media_type"),
        ({"Content-Type": ""}, 415, "unsupported_media_type"),
        ({"Content-Type": "application/json; charset=utf-8"}, 200, None),
        ({"Host": "evil.example"}, 403, "host_not_allowed"),
        ({"Host": "localhost:1"}, 200, None),
        ({"Host": "[::1]:80"}, 200, None),
    ],
)
def test_content_types_and_names_of_hosts(
    server: RunningServer, headers: dict[str, str], status: int, code: str | None
) -> None:
    answer, _, body = server.request("POST", "/v1/completions", BODY, headers)
    assert (answer, body.get("error", {}).get("code")) == (status, code)


def test_a_full_queue(small: RunningServer, gate: ModelGate) -> None:
    """A call is accepted whole or not at all; one that could never be accepted is another error."""
    client = openai.OpenAI(base_url=small.url, api_key=KEY, max_retries=0)
    streams = [client.completions.create(model=NAME, **BODY, stream=True)]  # type: ignore[call-overload]
    assert gate.entered.acquire(timeout=30)
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model=NAME, prompt=["the cat"] * 2, max_tokens=4)
    assert small.engine.status.num_running + small.engine.status.num_waiting == 1
    with pytest.raises(openai.BadRequestError, match="max_waiting = 2"):
        client.completions.create(model=NAME, prompt="the cat", max_tokens=4, n=3)
    streams.append(client.completions.create(model=NAME, **BODY, stream=True))  # type: ignore[call-overload]
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(model=NAME, prompt="the cat", max_tokens=4)
    assert caught.value.code == "queue_full" and caught.value.response.headers["retry-after"] == "1"
    gate.open()
    assert all(len(list(stream)) > 0 for stream in streams)
    small.wait_until_idle()
    text = small.request("GET", "/metrics", headers={"Authorization": f"Bearer {KEY}"})[2]
    assert 'vllm:admission_rejections_total{model_name="tiny",engine="0"} 2' in text


@pytest.mark.slow
def test_slow_readers_hold_up_nobody(start_server: StartServer) -> None:
    """The engine is done with them, and has room for others, long before they are given up."""
    server = start_server(max_requests=1, max_waiting=1, write_timeout_seconds=20, default_max_tokens=250)
    body = json.dumps({"prompt": "the", "stream": True, "diffusing": True, "logprobs": 5}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with ExitStack() as stack:
        for _ in range(2):
            connection = stack.enter_context(server.connect())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: server.service.num_active == 2 and server.engine.status.counts.num_steps > 0)
        wait_until(lambda: not server.engine.status.num_running + server.engine.status.num_waiting)
        assert server.service.num_active == 2, "both still send"
        assert server.request("POST", "/v1/completions", {"prompt": "the", "max_tokens": 1})[0] == 200
    server.wait_until_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_leave(server: RunningServer, gate: ModelGate, stream: bool) -> None:
    """While they wait, and while they are decoded: their requests end with the forward that is being computed."""
    connections = []
    for _ in range(3):
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        body = json.dumps({"prompt": "the cat", "max_tokens": 200, "stream": stream, "n": 2})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        connections.append(connection)
    assert gate.entered.acquire(timeout=30)
    wait_until(lambda: server.service.num_active == 3)
    for connection in connections:
        connection.close()
    wait_until(lambda: not server.service.num_active)
    before = server.engine.status.counts.num_steps
    gate.open()
    server.wait_until_idle()
    assert server.engine.status.counts.num_steps <= before + 2


def test_a_client_that_leaves_while_its_request_is_prepared(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The preparation goes on in its thread; nobody waits for it, and its choices are never submitted."""
    entered, release, prepared = threading.Event(), threading.Event(), threading.Event()
    prepare, submitted = server.service.preparer.prepare, list[Any]()

    def wait(*args: Any) -> Any:
        entered.set()
        assert release.wait(30)
        call = prepare(*args)
        prepared.set()
        return call

    monkeypatch.setattr(server.service.preparer, "prepare", wait)
    monkeypatch.setattr(server.engine, "submit_prepared", submitted.append)
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", "/v1/completions", json.dumps(BODY), {"Content-Type": "application/json"})
    assert entered.wait(30)
    connection.close()
    wait_until(lambda: not server.service.num_active)
    release.set()
    assert prepared.wait(30) and server.request("GET", "/health")[0] == 200
    assert submitted == []


def test_clients_that_leave_at_any_time(server: RunningServer) -> None:
    rng = random.Random(12)
    for number in range(12):
        with server.connect() as connection:
            fields = {"prompt": "the cat " * rng.randrange(9), "max_tokens": 60, "n": rng.randrange(1, 4)}
            body = json.dumps({**fields, "stream": number % 2 == 0, "diffusing": number % 4 == 0}).encode()
            data = head("/v1/completions", f"Content-Length: {len(body)}") + body
            connection.sendall(data[: rng.choice([len(data), len(data), rng.randrange(len(data))])])
            time.sleep(rng.random() * 0.04)
            if rng.random() < 0.5:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    server.wait_until_idle()
    assert server.request("POST", "/v1/completions", BODY)[0] == 200


def test_too_many_connections(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit the server still says that it lives, on some connections."""
    monkeypatch.setattr("diffusionlm.serving.http.server.MAX_PROBES", 1)
    server = start_server(max_connections=2)
    connections = server.connections
    with server.connect(), server.connect():
        wait_until(lambda: len(connections) == 2)
        for path in ("/health", "/metrics"):
            assert server.request("GET", path)[0] == 200
            wait_until(lambda: len(connections) == 2)
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/health/")):
            status, headers, body = server.request(method, path, BODY if method == "POST" else None)
            assert (status, body["error"]["code"]) == (503, "too_many_connections")
            assert (headers["retry-after"], headers["connection"]) == ("1", "close")
            wait_until(lambda: len(connections) == 2)
        with server.connect():
            wait_until(lambda: len(connections) == 3)
            assert send_raw(server, b"")[0] == 503
    wait_until(lambda: len(connections) == 0)
    assert server.request("GET", "/v1/models")[0] == 200


def test_keep_alive(start_server: StartServer) -> None:
    server = start_server(keep_alive_seconds=1000.5)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("GET", "/health")
    connection.getresponse().read()
    [protocol] = server.connections
    wait_until(lambda: protocol.timeout_keep_alive_task is not None)
    assert protocol.timeout_keep_alive_task.when() - protocol.loop.time() > 900
    connection.close()


def test_an_error_of_the_engine(start_server: StartServer, tiny_model: MakeModel, served_model: Transformer) -> None:
    """Streams end with an event, other requests with 503, and so does /health from then on."""
    model = tiny_model(**served_model.config.model_dump(include={"vocab_size", "mask_token_id", "block_length"}))
    server = start_server(model)
    forward, calls = model.forward, []

    def fail(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) > 3:
            raise RuntimeError("out of memory")
        return forward(*args, **kwargs)

    model.forward = fail  # type: ignore[method-assign]
    events = server.events("/v1/completions", {"prompt": "the cat", "max_tokens": 40})
    assert events[-1]["error"]["code"] == "engine_stopped" and "[DONE]" not in events
    for method, path in (("GET", "/health"), ("POST", "/v1/completions")):
        status, _, body = server.request(method, path, BODY if method == "POST" else None)
        assert (status, body["error"]["code"]) == (503, "engine_stopped")


def test_a_forward_that_hangs(start_server: StartServer, gate: ModelGate) -> None:
    """/health is 503 for as long as it does, and its requests are answered when it ends."""
    seconds = [0.0]
    server = start_server(clock=lambda: seconds[0], stall_seconds=60.0)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(server.request("POST", "/v1/completions", BODY)))
    thread.start()
    assert gate.entered.acquire(timeout=30)
    for now, expected in ((0.0, 200), (59.0, 200), (60.5, 503), (3600.0, 503)):
        seconds[0] = now
        status, _, body = server.request("GET", "/health")
        assert status == expected
        assert expected == 200 or body["error"]["code"] == "engine_stalled"
    gate.open()
    thread.join(30)
    assert results[0][0] == 200
    server.wait_until_idle()
    assert server.request("GET", "/health")[0] == 200


@pytest.mark.parametrize("seconds", [20.0, 0.1])
def test_the_end(start_server: StartServer, gate: ModelGate, seconds: float) -> None:
    """Requests that were accepted are answered, or end with an error when the time is over; new ones are refused."""
    server = start_server(drain_timeout_seconds=seconds)
    results: dict[bool, Any] = {}

    def ask(stream: bool) -> None:
        results[stream] = server.request("POST", "/v1/completions", {**BODY, "stream": stream})

    threads = [threading.Thread(target=ask, args=(stream,)) for stream in (True, False)]
    for thread in threads:
        thread.start()
    wait_until(lambda: server.engine.status.num_running + server.engine.status.num_waiting == 2)
    server.server.stop()
    wait_until(lambda: server.service.is_draining)
    for method, path in (("GET", "/health"), ("POST", "/v1/completions")):
        status, _, body = server.request(method, path, BODY if method == "POST" else None)
        assert (status, body["error"]["code"]) == (503, "draining")
    time.sleep(0.2 if seconds < 1 else 0)
    gate.open()
    for thread in [*threads, server.thread]:
        thread.join(30)
    if seconds > 1:
        assert results[False][0] == 200 and results[True][2].endswith("data: [DONE]\n\n")
    else:
        assert results[False][0] == 503 and '"code":"engine_stopped"' in results[True][2]
        assert "[DONE]" not in results[True][2]
    with pytest.raises(OSError):
        server.connect()


def test_the_end_during_an_upload(start_server: StartServer) -> None:
    """What is still being sent was not accepted: the client may send it to another server."""
    server = start_server()
    with server.connect() as connection:
        connection.sendall(head("/v1/completions", "Content-Length: 1000") + b'{"prompt": ')
        wait_until(lambda: any(protocol.cycle for protocol in [*server.connections]))
        server.server.stop()
        response = http.client.HTTPResponse(connection)
        response.begin()
        error = json.loads(response.read())["error"]
    assert (response.status, error["code"], response.headers["retry-after"]) == (503, "draining", "1")
    server.thread.join(30)
    assert not server.thread.is_alive()


@pytest.mark.parametrize("path", ["/", "/v1/completions", "refused"])
def test_a_client_that_never_reads_loses_its_connection(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A whole response, a stream that waits for the reader, and the response to what is not HTTP."""
    large = b"x" * (16 << 20)
    monkeypatch.setattr("diffusionlm.serving.http.app.load_page", lambda: Response(large))
    monkeypatch.setattr("diffusionlm.serving.http.endpoints.to_event", lambda value: large)
    monkeypatch.setattr("diffusionlm.serving.http.server.to_json", lambda value: large)
    server = start_server(write_timeout_seconds=0.1)
    body = json.dumps({**BODY, "stream": True}).encode()
    request = head(path, f"Content-Length: {len(body)}", method="GET" if path == "/" else "POST") + body
    connections = server.connections
    with server.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.sendall(b"nonsense\r\n\r\n" if path == "refused" else request)
        wait_until(lambda: connections)
        transports = [protocol.transport for protocol in connections]
        wait_until(lambda: not connections)
        assert [transport.get_write_buffer_size() for transport in transports] == [0]
        assert [transport.get_extra_info("socket").fileno() for transport in transports] == [-1]
    server.wait_until_idle()


def test_a_slow_reader_that_goes_on_keeps_its_connection(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its response takes longer than a reader that does not go on may take."""
    size = 8 << 20
    monkeypatch.setattr("diffusionlm.serving.http.app.load_page", lambda: Response(b"x" * size))
    server = start_server(write_timeout_seconds=1.0)
    num_read, start = 0, time.monotonic()
    with server.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        connection.sendall(head("/", method="GET"))
        while data := connection.recv(1 << 18):
            num_read += len(data)
            time.sleep(len(data) / size * 1.5)
    assert num_read > size and time.monotonic() - start > 1.5
