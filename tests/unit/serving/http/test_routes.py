"""Routes that decode nothing, and refusals of what is no request."""

from __future__ import annotations

import pytest

from tests.unit.serving.http.conftest import RunningServer


def test_health_and_metrics(server: RunningServer) -> None:
    status, headers, body = server.request("GET", "/health")
    assert (status, body) == (200, {"status": "ok"}) and headers["x-request-id"]
    assert server.request("GET", "/health", headers={"x-request-id": "mine-1"})[1]["x-request-id"] == "mine-1"
    status, headers, text = server.request("GET", "/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'vllm:num_requests_running{model_name="tiny",engine="0"} 0' in text


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/nothing", 404, "not_found_error"),
        ("GET", "/v1/completions", 405, "invalid_request_error"),
        ("POST", "/health", 405, "invalid_request_error"),
    ],
)
def test_unknown_routes(server: RunningServer, method: str, path: str, status: int, kind: str) -> None:
    answer, headers, body = server.request(method, path)
    assert (answer, body["error"]["type"]) == (status, kind)
    assert status != 405 or "allow" in headers
