"""Routes that decode nothing, models, counts and the log."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.unit.serving.http.conftest import NAME, RunningServer, StartServer, wait_until

PROMPT = [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/health", 405),
        ("GET", "/v1/models/a/b", 404),
    ],
)
def test_unknown_routes(server: RunningServer, method: str, path: str, status: int) -> None:
    answer, headers, body = server.request(method, path)
    kind = {404: "not_found_error", 405: "invalid_request_error"}[status]
    assert (answer, body["error"]["type"]) == (status, kind) and (status != 405 or "allow" in headers)


def test_ids_of_requests(server: RunningServer) -> None:
    ids = [server.request("GET", "/health")[1]["x-request-id"] for _ in range(2)]
    assert len({*ids}) == 2
    assert server.request("GET", "/health", headers={"x-request-id": "mine-1"})[1]["x-request-id"] == "mine-1"
    for bad in ("a b", "x" * 65, "<script>"):
        assert server.request("GET", "/health", headers={"x-request-id": bad})[1]["x-request-id"] != bad


def read_metrics(server: RunningServer) -> dict[str, float]:
    status, headers, text = server.request("GET", "/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name.replace(f'model_name="{NAME}",engine="0"', "").replace("{}", ""): float(value)
            for name, _, value in lines}  # fmt: skip


def test_metrics(start_server: StartServer) -> None:
    server = start_server()
    assert server.request("GET", "/health")[2] == {"status": "ok"}
    assert read_metrics(server)["vllm:num_requests_running"] == 0
    body = {"prompt": PROMPT, "max_tokens": 8, "denoising_steps": 2, "n": 2}
    answer = server.request("POST", "/v1/completions", body)[2]
    forwards = sum(choice["num_forwards"] for choice in answer["choices"])
    server.request("POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": 8, "temperature": -1})
    metrics = read_metrics(server)
    expected = {
        'vllm:request_success_total{,finished_reason="length"}': 2,
        "vllm:generation_tokens_total": 16,
        "vllm:prompt_tokens_total": 10,
        "vllm:request_generation_tokens_sum": 16,
        'vllm:request_generation_tokens_bucket{,le="5"}': 0,
        'vllm:request_generation_tokens_bucket{,le="10"}': 2,
        'vllm:request_generation_tokens_bucket{,le="+Inf"}': 2,
        "vllm:time_to_first_token_seconds_count": 2,
        "vllm:e2e_request_latency_seconds_count": 2,
        "diffusionlm:request_steps_total": forwards,
        "diffusionlm:request_forwards_sum": forwards,
        "vllm:kv_cache_usage_perc": 0,
    }
    assert {name: metrics[name] for name in expected} == expected
    assert metrics["diffusionlm:forwards_total"] <= forwards
    rounds, rows = metrics["diffusionlm:forwards_total"], metrics["diffusionlm:rows_total"]
    name = "vllm:iteration_tokens_total"
    assert (metrics[f"{name}_count"], metrics[f"{name}_sum"]) == (rounds, rows)
    # The first round reads the prompt of 5 tokens and a block, with both choices at once or one after the other.
    assert metrics[f'{name}_bucket{{,le="1"}}'] == 0 < metrics[f'{name}_bucket{{,le="8"}}']
    assert metrics[f'{name}_bucket{{,le="32"}}'] == metrics[f'{name}_bucket{{,le="+Inf"}}'] == rounds
    assert 0 < metrics["diffusionlm:model_seconds_total"] <= metrics["diffusionlm:busy_seconds_total"]


def test_the_log_has_counts_and_no_texts(start_server: StartServer, caplog: pytest.LogCaptureFixture) -> None:
    server = start_server(log_requests=True)
    with caplog.at_level(logging.INFO, "diffusionlm"):
        server.request("POST", "/v1/completions", {"prompt": "secret", "max_tokens": 3}, {"x-request-id": "r1"})
        server.request("POST", "/v1/completions", {"prompt": "secret", "top_p": "secret"})
        server.request("GET", "/a%1b%5bm%0d%0a%e2%80%ae" + "b" * 300)
        wait_until(lambda: len(caplog.records) == 3)
    first, second, third = [record.getMessage() for record in caplog.records]
    assert "POST /v1/completions 200 id=r1 model=tiny choices=1" in first and "new_tokens=3 forwards=3 " in first
    assert " 400 id=" in second and "secret" not in caplog.text
    assert third.startswith("GET /a\\x1b[m\\r\\n\\u202ebbb") and len(third) < 250


def test_an_unexpected_error_ends_its_request(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("unexpected")

    with monkeypatch.context() as patch:
        patch.setattr(server.service.preparer, "prepare", fail)
        status, _, body = server.request("POST", "/v1/completions", {"prompt": PROMPT})
        assert (status, body["error"]["code"]) == (500, "internal_error") and "unexpected" not in str(body)
        patch.undo()
        patch.setattr("diffusionlm.serving.http.completions.CompletionAnswer._new_contents", fail)
        events = server.events("/v1/completions", {"prompt": PROMPT, "max_tokens": 4})
        assert [event["error"]["code"] for event in events] == ["internal_error"]
    assert caplog.text.count("has failed") == 2 and caplog.text.count("RuntimeError: unexpected") == 2
    assert server.request("POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": 2})[0] == 200
    server.wait_until_idle()
