"""What a load test has measured: latencies, rates and errors, and what the server counted meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarking.serving.load import AnswerCheck, LoadResult, RequestRecord
from config.bench.serve import GoodputSection
from logger.pages import Cell, Column, Part, Table

PERCENTILES = {"median": 50, "p90": 90, "p99": 99}
LATENCY_NAMES = {
    "ttft_ms": "time to the first text (TTFT), ms",
    "tpot_ms": "time per further token (TPOT), ms",
    "gap_ms": "between pieces of text, ms",
    "e2el_ms": "time to the end (E2EL), ms",
    "tokens_per_chunk": "tokens per piece of text",
}


COUNTERS = {
    "diffusionlm:forwards_total": "num_forwards",
    "diffusionlm:request_steps_total": "num_request_steps",
    "diffusionlm:model_seconds_total": "model_seconds",
    "diffusionlm:busy_seconds_total": "busy_seconds",
    "vllm:generation_tokens_total": "new_tokens",
    "vllm:num_preemptions_total": "num_preemptions",
    "vllm:prefix_cache_queries_total": "num_prefix_queries",
    "vllm:prefix_cache_hits_total": "num_prefix_hits",
}
"""Metric of a server -> its name here. A forward takes a decoding step of each request that it decodes; the model's
seconds are those of forwards and sampling, the busy ones those with work."""
RATIOS = {
    "tokens_per_forward": ("new_tokens", "num_forwards"),
    "tokens_per_step": ("new_tokens", "num_request_steps"),
    "model_share": ("model_seconds", "busy_seconds"),
    "prefix_hit_share": ("num_prefix_hits", "num_prefix_queries"),
}
SERVER_ROWS = {
    "num_forwards": ("forwards", ",.0f"),
    "tokens_per_forward": ("tokens per forward, all requests", ".2f"),
    "tokens_per_step": ("tokens per forward of a request", ".2f"),
    "host_share": ("host share of the time with work", ".1%"),
    "num_preemptions": ("preemptions", ",.0f"),
    "prefix_hit_share": ("prompt tokens from the prefix cache", ".1%"),
}


def parse_counts(text: str) -> dict[str, float]:
    """Read the counters that a server has from its page of metrics, summed over their labels."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        name, _, rest = line.partition("{" if "{" in line else " ")
        if name in COUNTERS:
            with suppress(ValueError, IndexError):
                value = float(rest.rpartition("}")[2].split()[0])
                sums[COUNTERS[name]] = sums.get(COUNTERS[name], 0.0) + value
    return sums


def compare_counts(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """The growth of each counter, and the ratios that follow from it."""
    growth = {name: after[name] - before[name] for name in after if name in before}
    ratios = {
        name: growth[above] / growth[below]
        for name, (above, below) in RATIOS.items()
        if above in growth and growth.get(below)
    }
    if "model_share" in ratios:
        ratios["host_share"] = 1.0 - ratios.pop("model_share")
    return growth | ratios


def measure_latencies(record: RequestRecord) -> dict[str, float]:
    """The times of a complete request in milliseconds, by the keys of `GoodputSection`, as `vllm bench serve` defines
    them; tpot only of several tokens. A first piece of several tokens makes tpot low."""
    assert record.end is not None, "the request is complete"
    first = record.chunk_times[0] if record.chunk_times else record.end
    ttft, e2el, num_further = 1e3 * (first - record.start), 1e3 * (record.end - record.start), record.num_tokens - 1
    return {"ttft": ttft, "e2el": e2el} | ({"tpot": (e2el - ttft) / num_further} if num_further > 0 else {})


def is_good(record: RequestRecord, limits: GoodputSection) -> bool:
    """Whether a request is complete and within all limits."""
    if not record.is_complete:
        return False
    latencies = measure_latencies(record)
    return all(latencies.get(name, 0.0) <= limit for name, limit in limits.model_dump(exclude_none=True).items())


@dataclass(frozen=True)
class LoadSummary:
    """The results of a load test."""

    seconds: float
    num_requests: int
    num_complete: int
    max_in_flight: int
    errors: Mapping[str, int]
    """Kind of error, such as "HTTP 429" -> number of requests."""
    prompt_tokens: int | None
    """None: the server does not count them."""
    new_tokens: int
    are_tokens_counted: bool
    """False: the server does not count new tokens, and each piece of text counts as one."""
    distributions: Mapping[str, Mapping[str, float]]
    """Key of `LATENCY_NAMES` -> mean and percentiles over all complete requests; only what they have."""
    num_good: int | None
    """None: there are no limits."""
    server: Mapping[str, float]
    """What the server counted, and ratios of it; only what it has."""
    check: AnswerCheck

    def to_json(self) -> dict[str, Any]:
        """All results, and the rates that follow from them."""
        return asdict(self) | {
            "requests_per_second": self.num_complete / self.seconds,
            "tokens_per_second": self.new_tokens / self.seconds,
            "goodput_per_second": None if self.num_good is None else self.num_good / self.seconds,
        }


def summarize(
    result: LoadResult, limits: GoodputSection, server: Mapping[str, float], check: AnswerCheck
) -> LoadSummary:
    """Compute the results of a load test."""
    complete = [record for record in result.records if record.is_complete]
    prompt_tokens = [record.prompt_tokens for record in complete]
    has_limits = any(limit is not None for limit in limits.model_dump().values())
    return LoadSummary(
        seconds=result.end - result.start,
        num_requests=len(result.records),
        num_complete=len(complete),
        max_in_flight=result.max_in_flight,
        errors=dict(Counter(record.error for record in result.records if record.error is not None)),
        prompt_tokens=None if None in prompt_tokens else sum(count or 0 for count in prompt_tokens),
        new_tokens=sum(record.num_tokens for record in complete),
        are_tokens_counted=all(record.new_tokens is not None for record in complete),
        distributions={name: _describe(values) for name, values in _collect(complete).items() if values},
        num_good=sum(is_good(record, limits) for record in result.records) if has_limits else None,
        server=server,
        check=check,
    )


def format_summary(model: str, summary: LoadSummary, limits: GoodputSection) -> list[Part]:
    """Two tables: counts and rates, and the distributions."""
    rows = [["model", model], ["requests", f"{summary.num_complete:,} of {summary.num_requests:,} complete"]]
    rows += [[f"failed: {kind}", f"{count:,}"] for kind, count in sorted(summary.errors.items())]
    tokens = "new tokens" if summary.are_tokens_counted else "pieces of text (the server does not count tokens)"
    rows += [
        ["seconds", f"{summary.seconds:,.2f}"],
        ["at most under way", f"{summary.max_in_flight:,}"],
        *([] if summary.prompt_tokens is None else [["prompt tokens", f"{summary.prompt_tokens:,}"]]),
        [tokens, f"{summary.new_tokens:,}"],
        ["requests/s", f"{summary.num_complete / summary.seconds:,.3f}"],
        ["tokens/s" if summary.are_tokens_counted else "pieces/s", f"{summary.new_tokens / summary.seconds:,.1f}"],
    ]
    if summary.num_good is not None:
        named = [f"{name} <= {limit:g} ms" for name, limit in limits.model_dump().items() if limit is not None]
        share = f"{summary.num_good / summary.seconds:,.3f}/s, {summary.num_good / summary.num_requests:.1%}"
        rows.append([f"good requests ({', '.join(named)})", share])
    rows += [
        [label, format(summary.server[name], style)]
        for name, (label, style) in SERVER_ROWS.items()
        if name in summary.server
    ]
    if summary.check.num_checked:
        share = f"{summary.check.num_equal:,} of {summary.check.num_checked:,}"
        rows.append(["answers equal to those alone", share])
    keys = ("mean", *PERCENTILES)
    distributions: list[list[Cell]] = [
        [LATENCY_NAMES[name], *(values[key] for key in keys)] for name, values in summary.distributions.items()
    ]
    return [Table((), rows), "", Table(["", *(Column(key, ",.2f") for key in keys)], distributions)]


def _collect(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Key of `LATENCY_NAMES` -> values of all requests."""
    latencies = [measure_latencies(record) for record in records]
    counted = [record for record in records if record.new_tokens is not None and record.chunk_times]
    return {
        "ttft_ms": [value["ttft"] for value in latencies],
        "tpot_ms": [value["tpot"] for value in latencies if "tpot" in value],
        "gap_ms": [1e3 * (end - start) for record in records for start, end in pairwise(record.chunk_times)],
        "e2el_ms": [value["e2el"] for value in latencies],
        "tokens_per_chunk": [(record.new_tokens or 0) / len(record.chunk_times) for record in counted],
    }


def _describe(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles, by linear interpolation."""
    values_N = np.array(values)
    percentiles = {name: float(np.percentile(values_N, percent)) for name, percent in PERCENTILES.items()}
    return {"mean": float(values_N.mean()), **percentiles}
