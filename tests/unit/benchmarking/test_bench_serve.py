"""The load generator, against a server whose clock and answers are known."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from benchmarking.serving.bench_serve import BenchServeResult, bench_serve
from benchmarking.serving.load import Clock, arrival_times, build_requests
from benchmarking.serving.summary import format_summary
from config.bench.serve import BenchServeConfig, RequestsSection
from files.usage_error import UsageError
from logger.pages import Table

METRICS = """# HELP vllm:generation_tokens_total Tokens.
vllm:generation_tokens_total{{model_name="a b",engine="0"}} {tokens}
vllm:generation_tokens_total{{model_name="x}}y"}} 1
diffusionlm:forwards_total {forwards}
diffusionlm:request_steps_total {forwards}.0 1700000000
diffusionlm:model_seconds_total {model_seconds}
diffusionlm:busy_seconds_total {busy_seconds}
vllm:broken{{x="1"}}
vllm:time_bucket{{le="+Inf"}} 7
"""


@dataclass
class FakeServer(httpx2.AsyncBaseTransport):
    """An OpenAI-compatible server in virtual time: its clock advances as it says, and when somebody sleeps."""

    chunks: Sequence[tuple[float, str]] = ((1.0, "ab"), (0.5, "c"), (0.25, " \u2028d"))
    """Seconds before a piece of text, and the piece."""
    tokens: int = 9
    metrics: str | None = METRICS
    answer: Callable[[dict[str, Any], int], list[str] | int] | None = None
    """Gets a body and the number of requests before it; returns the data of all events, or an HTTP status."""
    time: float = 100.0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    start_times: list[float] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)

    @property
    def clock(self) -> Clock:
        async def sleep(seconds: float) -> None:
            for _ in range(10):  # let requests that were sent before begin
                await asyncio.sleep(0)
            self.time += seconds

        return Clock(lambda: self.time, sleep)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.keys.add(request.headers.get("Authorization"))
        if request.url.path == "/v1/models":
            return httpx2.Response(200, json={"object": "list", "data": [{"id": "tiny"}, {"id": "other"}]})
        if request.url.path == "/metrics":
            count = len(self.bodies)
            values = {"forwards": 3 * count, "model_seconds": 1.5 * count, "busy_seconds": 2 * count}
            text = (self.metrics or "").format(tokens=self.tokens * count, **values)
            return httpx2.Response(404 if self.metrics is None else 200, text=text)
        body = json.loads(await request.aread())
        self.paths.append(request.url.path)
        self.start_times.append(self.time)
        events = self.answer(body, len(self.bodies)) if self.answer is not None else self.events(body)
        self.bodies.append(body)
        if isinstance(events, int):
            return httpx2.Response(events, json={"error": {"message": "no"}})
        return httpx2.Response(200, content=self.stream(events))

    def events(self, body: dict[str, Any]) -> list[str]:
        def choice(text: str, finish_reason: str | None) -> dict[str, Any]:
            content = {"delta": {"content": text}} if "messages" in body else {"text": text}
            return {"index": 0, "finish_reason": finish_reason, **content}

        usage = {"prompt_tokens": 5, "completion_tokens": self.tokens}
        last = {"choices": [choice("", "length")]}
        pieces: list[dict[str, Any]] = [{"choices": [choice(text, None)]} for _, text in self.chunks]
        events = [*pieces, last, {"choices": [], "usage": usage}]
        return [*(json.dumps(event, ensure_ascii=False) for event in events), "[DONE]"]

    async def stream(self, events: Sequence[str]) -> AsyncIterator[bytes]:
        delays = [delay for delay, _ in self.chunks]
        for index, event in enumerate(events):
            self.time += delays[index] if index < len(delays) else 0.0
            data = f": comment\n\ndata: {event}\n\n".encode()
            await asyncio.sleep(0)
            # Events arrive in pieces of any size.
            yield data[: len(data) // 2]
            yield data[len(data) // 2 :]


def run(fake: FakeServer, /, *, load: dict[str, Any] | None = None, **sections: dict[str, Any]) -> BenchServeResult:
    values = {"load": {"warmup": 0, **(load or {})}, **sections}
    return bench_serve(BenchServeConfig.model_validate(values), clock=fake.clock, transport=fake)


def read_rows(result: BenchServeResult) -> list[list[list[str]]]:
    """The texts of both tables."""
    parts = format_summary(result.model, result.summary, BenchServeConfig().goodput)
    return [list(map(part.texts, part.rows)) for part in parts if isinstance(part, Table)]


@pytest.mark.parametrize(("endpoint", "path"), [("completions", "/v1/completions"), ("chat", "/v1/chat/completions")])
def test_times_and_rates(endpoint: str, path: str) -> None:
    server = FakeServer()
    result = run(server, server={"endpoint": endpoint}, requests={"count": 4}, goodput={"ttft": 1000, "tpot": 93})
    summary = result.summary
    assert (result.model, result.problems, set(server.paths)) == ("tiny", [], {path})
    assert (summary.num_complete, summary.seconds, summary.max_in_flight) == (4, 7.0, 1)
    assert (summary.prompt_tokens, summary.new_tokens) == (20, 36)
    means = {name: values["mean"] for name, values in summary.distributions.items()}
    assert means == {"ttft_ms": 1000.0, "tpot_ms": 93.75, "gap_ms": 375.0, "e2el_ms": 1750.0, "tokens_per_chunk": 3.0}
    assert summary.num_good == 0
    assert (summary.check.num_equal, summary.check.num_checked, len(server.bodies)) == (4, 4, 8)
    assert summary.server["num_forwards"] == 12  # of the measurement alone
    assert (summary.server["tokens_per_forward"], summary.server["host_share"]) == (3.0, 0.25)
    rates = summary.to_json()
    assert (rates["tokens_per_second"], rates["requests_per_second"]) == (36 / 7, 4 / 7)
    rows, table = read_rows(result)
    assert ["answers equal to those alone", "4 of 4"] in rows and ["tokens per forward, all requests", "3.00"] in rows
    assert table[0] == ["time to the first text (TTFT), ms", "1,000.00", "1,000.00", "1,000.00", "1,000.00"]


def test_bodies() -> None:
    server = FakeServer()
    body = {"temperature": 0.5, "stop_token_ids": []}
    requests = {"count": 2, "seed": 7, "body": body, "prompt_length": [3, 3], "answer_length": [4, 6]}
    run(server, requests=requests, load={"warmup": 1}, check={"max_requests": 0})
    warmup, *bodies = server.bodies
    assert [body["seed"] for body in bodies] == [7, 8] and warmup["seed"] == 9
    for sent in server.bodies:
        assert sent["model"] == "tiny" and sent["stream"] and sent["stream_options"] == {"include_usage": True}
        assert sent["temperature"] == 0.5 and sent["stop_token_ids"] == []
        assert len(sent["prompt"].split()) == 3 and 4 <= sent["max_tokens"] <= 6
    again = FakeServer()
    run(again, requests={**requests, "count": 3}, check={"max_requests": 0})
    assert again.bodies[:2] == bodies


def test_requests_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    lines = [{"prompt": "one", "max_tokens": 3, "seed": 5}, {"prompt_length": 4}]
    path.write_text("\n\n".join(map(json.dumps, lines)), encoding="utf-8")
    requests = build_requests(RequestsSection(file=path, count=3, answer_length=(9, 9)), is_chat=False)
    assert [request["max_tokens"] for request in requests] == [3, 9, 3]
    assert [request["seed"] for request in requests] == [5, 1, 5]
    assert requests[0]["prompt"] == "one" and len(requests[1]["prompt"].split()) == 4
    [first, _] = build_requests(RequestsSection(file=path), is_chat=True)
    assert first["messages"] == [{"role": "user", "content": "one"}] and "prompt" not in first


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", ":1: : Invalid JSON"),
        ('{"prompt": [1, true]}', "prompt.list[int].1: Input should be a valid integer"),
        ('{"prompt": "a", "prompt_length": 3}', "expected one of the keys"),
        ('{"messages": [{}]}', 'need server.endpoint = "chat"'),
    ],
)
def test_a_wrong_file_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        build_requests(RequestsSection(file=path), is_chat=False)
    assert str(caught.value).startswith(str(path)) and problem in str(caught.value)


def test_requests_are_sent_at_their_times() -> None:
    server = FakeServer(chunks=((0.0, "a"),), tokens=1)
    run(server, requests={"count": 5, "seed": 3}, load={"rate": 2.0}, check={"max_requests": 0})
    expected = [100.0 + time for time in arrival_times(2.0, 5, seed=3)]
    assert server.start_times == pytest.approx(expected)


def test_requests_under_way() -> None:
    for load, expected in (({"concurrency": 3}, 3), ({"rate": 1e9}, 8), ({"rate": 1e9, "concurrency": 2}, 2)):
        fake = FakeServer(chunks=((0.0, "a"),) * 100)
        result = run(fake, requests={"count": 8}, load=load, check={"max_requests": 0})
        assert result.summary.max_in_flight == expected


def test_errors_are_counted_and_their_times_are_not() -> None:
    server = FakeServer()

    def answer(body: dict[str, Any], number: int) -> list[str] | int:
        whole = server.events(body)
        failures: list[list[str] | int] = [429, 503, [*whole[:1], '{"error": {"message": "x"}}'], whole[:2], ["{"], 429]
        return failures[number] if number < len(failures) else whole

    server.answer = answer
    result = run(server, requests={"count": 8})
    assert result.summary.errors == {"HTTP 429": 2, "HTTP 503": 1, "stream": 1, "incomplete": 1, "invalid": 1}
    assert result.summary.num_complete == result.summary.check.num_equal == 2 and not result.problems
    assert result.summary.distributions["ttft_ms"]["mean"] == 1000.0
    assert ["failed: HTTP 429", "2"] in read_rows(result)[0]
    server.answer = lambda *_: 400
    [problem] = run(server, requests={"count": 2}).problems
    assert problem.startswith('no request was complete; the first: HTTP 400: {"error"')


def test_other_answers_are_an_error() -> None:
    def make() -> FakeServer:
        server = FakeServer()
        # Request 2 of 4 gets another text under load; alone all are equal.
        server.answer = lambda body, number: [
            event.replace("ab", "xy") if number == 2 else event for event in server.events(body)
        ]
        return server

    result = run(make(), requests={"count": 4})
    assert (result.summary.check.num_equal, result.summary.check.mismatches) == (3, [2])
    assert result.problems == [
        "1 of 4 answers under load differ from those alone (requests 2); check.allow_mismatches = true only counts them"
    ]
    assert not run(make(), requests={"count": 4}, check={"allow_mismatches": True}).problems
    assert not run(make(), requests={"count": 4}, check={"max_requests": 2}).problems


def test_a_server_that_counts_nothing(tmp_path: Path) -> None:
    server = FakeServer(metrics=None)
    server.answer = lambda body, _: server.events(body)[:-2]
    result = run(server, requests={"count": 1}, output={"path": str(tmp_path / "new" / "out.json")})
    summary = result.summary
    assert (summary.prompt_tokens, summary.new_tokens, summary.are_tokens_counted) == (None, 3, False)
    assert summary.distributions["tpot_ms"]["mean"] == 375.0 and "tokens_per_chunk" not in summary.distributions
    assert not summary.server
    assert ["pieces/s", f"{3 / 1.75:.1f}"] in read_rows(result)[0]
    record = json.loads((tmp_path / "new" / "out.json").read_text(encoding="utf-8"))
    assert record["requests"][0]["chunk_times"] == [1.0, 1.5, 1.75]
    assert record["results"]["tokens_per_second"] == 3 / 1.75 and record["config"]["requests"]["count"] == 1


def test_a_server_without_models() -> None:
    for response in (httpx2.Response(401), httpx2.Response(200, json={"data": []})):
        with pytest.raises(ValueError, match="start a server, correct the address, or set"):
            bench_serve(BenchServeConfig(), transport=httpx2.MockTransport(lambda _, response=response: response))
