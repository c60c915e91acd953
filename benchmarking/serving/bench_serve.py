"""Load for an OpenAI-compatible server: sends requests, measures them, and checks their answers."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx2

from benchmarking.harness import prepare_output_file
from benchmarking.serving.load import (
    AnswerCheck,
    Clock,
    LoadClient,
    LoadResult,
    Send,
    arrival_times,
    build_requests,
    check_answers,
    run_load,
)
from benchmarking.serving.summary import LoadSummary, compare_counts, parse_counts, summarize
from config.bench.serve import BenchServeConfig, ServerSection
from files.atomic import write_text_atomic
from files.usage_error import UsageError
from logger.console import ProgressMeter

SYSTEM_CLOCK = Clock(time.perf_counter)
MAX_SHOWN_MISMATCHES = 3


@dataclass(frozen=True)
class BenchServeResult:
    """A load test and its results."""

    model: str
    summary: LoadSummary
    problems: Sequence[str]
    """Why the load test has failed; empty: it has not."""


def bench_serve(
    config: BenchServeConfig, *, clock: Clock = SYSTEM_CLOCK, transport: httpx2.AsyncBaseTransport | None = None
) -> BenchServeResult:
    """Run a load test; progress goes to stderr, JSON to the output file.

    Args:
        transport: in place of connections to the server.

    Raises:
        ValueError: a file is wrong, or the server cannot be reached or does not list the model.
    """
    is_chat, num_warmup = config.server.endpoint == "chat", config.load.warmup
    requests = build_requests(config.requests, is_chat=is_chat, num_warmup=num_warmup)
    prepare_output_file(config.output)
    return asyncio.run(_bench(config, requests, clock, transport))


async def _bench(
    config: BenchServeConfig,
    requests: Sequence[Mapping[str, Any]],
    clock: Clock,
    transport: httpx2.AsyncBaseTransport | None,
) -> BenchServeResult:
    server, load = config.server, config.load
    meter = ProgressMeter(sys.stderr)
    async with httpx2.AsyncClient(
        headers=_read_headers(server),
        timeout=server.timeout_seconds,
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
        transport=transport,
        trust_env=False,  # a proxy of the environment would be measured as well
    ) as client:
        model = await _find_model(client, server)
        send = LoadClient(client, server.url, is_chat=server.endpoint == "chat", clock=clock).send
        bodies = [{"model": model, **request} for request in requests]
        bodies, warmup = bodies[: len(bodies) - load.warmup], bodies[len(bodies) - load.warmup :]
        await _warm_up(send, warmup, meter)
        before = await _read_counts(client, server)
        meter.begin("requests", "requests", len(bodies))
        result = await run_load(
            send,
            bodies,
            clock=clock,
            concurrency=load.concurrency or (1 if load.rate is None else None),
            arrivals=None if load.rate is None else arrival_times(load.rate, len(bodies), config.requests.seed),
            on_progress=meter.set,
        )
        counts = compare_counts(before, await _read_counts(client, server))
        meter.begin("requests alone", "requests")
        check = await check_answers(
            send, bodies, result.records, max_requests=config.check.max_requests, on_progress=meter.set
        )
        meter.close()
    summary = summarize(result, config.goodput, counts, check)
    if config.output.path is not None:
        write_text_atomic(config.output.path, _to_json(config, model, summary, result) + "\n")
    return BenchServeResult(model, summary, _find_problems(config, result, check))


def _read_headers(server: ServerSection) -> dict[str, str]:
    path = server.api_key_file
    if path is None:
        return {}
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"server.api_key_file = {path} cannot be read: {error}") from None
    key = lines[0].strip() if lines else ""
    if not key or not key.isprintable():
        raise UsageError(f"server.api_key_file = {path}: its first line must be a key")
    return {"Authorization": f"Bearer {key}"}


async def _find_model(client: httpx2.AsyncClient, server: ServerSection) -> str:
    """The name of the model of the config, else the first that the server lists.

    Raises:
        ValueError: there is no server, it refuses, or it lists no model.
    """
    if server.model is not None:
        return server.model
    try:
        response = await client.get(f"{server.url}/models")
        return str(response.raise_for_status().json()["data"][0]["id"])
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"server.url = {server.url}: /models lists no model ({str(error) or type(error).__name__}): start a "
            "server, correct the address, or set server.model and server.api_key_file"
        ) from None


async def _warm_up(send: Send, bodies: Sequence[Mapping[str, Any]], meter: ProgressMeter) -> None:
    """Send requests that are in no result, one after another.

    Raises:
        ValueError: one fails.
    """
    meter.begin("warm-up", "requests", len(bodies))
    for done, body in enumerate(bodies, 1):
        record = await send(body)
        if not record.is_complete:
            raise ValueError(f"the server has refused a request: {record.error}: {record.error_text}")
        meter.set(done)


async def _read_counts(client: httpx2.AsyncClient, server: ServerSection) -> dict[str, float]:
    """The server's own counters; none if it has no such page."""
    try:
        response = await client.get(server.url.removesuffix("/v1") + "/metrics")
    except httpx2.HTTPError:
        return {}
    return parse_counts(response.text) if response.status_code == 200 else {}


def _find_problems(config: BenchServeConfig, result: LoadResult, check: AnswerCheck) -> list[str]:
    problems = []
    failed = [record for record in result.records if not record.is_complete]
    if len(failed) == len(result.records):
        problems.append(f"no request was complete; the first: {failed[0].error}: {failed[0].error_text}")
    if check.failures:
        problems.append(f"{len(check.failures)} requests had an answer under load, and none alone")
    if check.mismatches and not config.check.allow_mismatches:
        shown = ", ".join(map(str, check.mismatches[:MAX_SHOWN_MISMATCHES]))
        shown += ", ..." if len(check.mismatches) > MAX_SHOWN_MISMATCHES else ""
        problems.append(
            f"{len(check.mismatches)} of {check.num_checked} answers under load differ from those alone (requests "
            f"{shown}); check.allow_mismatches = true only counts them"
        )
    return problems


def _to_json(config: BenchServeConfig, model: str, summary: LoadSummary, result: LoadResult) -> str:
    requests = [asdict(record) | {"start": record.start - result.start} for record in result.records]
    for request in requests:
        request["chunk_times"] = [time - result.start for time in request["chunk_times"]]
        request["end"] = None if request["end"] is None else request["end"] - result.start
    return json.dumps(
        {
            "config": config.model_dump(mode="json", exclude_none=True),
            "model": model,
            "results": summary.to_json(),
            "requests": requests,
        },
        indent=2,
    )
