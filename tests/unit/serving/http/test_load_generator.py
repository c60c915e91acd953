"""The load generator at the real server: its answers, and what both count."""

from __future__ import annotations

from typing import Any

from benchmarking.serving.bench_serve import bench_serve
from config.bench.serve import BenchServeConfig
from tests.unit.serving.http.conftest import RunningServer


def test_answers_under_load_are_those_alone(server: RunningServer) -> None:
    requests: dict[str, Any] = {"count": 6, "prompt_length": [2, 12], "answer_length": [4, 12]}
    requests["body"] = {"temperature": 0.7, "denoising_steps": 2}
    load = {"concurrency": 3, "warmup": 1}
    values = {"server": {"url": server.url, "endpoint": "chat"}, "requests": requests, "load": load}
    before = server.engine.status.counts
    result = bench_serve(BenchServeConfig.model_validate(values))
    summary = result.summary
    assert (result.model, result.problems, summary.errors) == ("tiny", [], {})
    assert (summary.num_complete, summary.check.num_equal, summary.max_in_flight) == (6, 6, 3)
    assert summary.are_tokens_counted and summary.new_tokens == summary.server["new_tokens"]
    after = server.engine.status.counts
    assert 0 < summary.server["num_forwards"] < after.num_steps - before.num_steps
    # Blocks of 4 in 2 steps: at most two tokens of a request for each of its forwards.
    assert 1.0 <= summary.server["tokens_per_step"] <= 2.0
    assert 0.0 < summary.server["host_share"] < 1.0
    server.wait_until_idle()
