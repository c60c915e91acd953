"""Addresses, and how many connections the system allows."""

from __future__ import annotations

import resource

import pytest

from diffusionlm.serving.http.access import BACKLOG, fit_connections, format_url, is_loopback


def test_addresses() -> None:
    names = ("localhost", "127.0.0.1", "127.1.2.3", "::1", "[::1]", "0.0.0.0", "::", "example.org", "10.0.0.1")
    assert [is_loopback(name) for name in names] == [True] * 5 + [False] * 4
    assert format_url("::1", 80) == format_url("[::1]", 80) == "http://[::1]:80"
    assert format_url("localhost", 80) == "http://localhost:80"


@pytest.mark.parametrize(
    ("soft", "hard", "expected", "raised"),
    [
        (1024, -1, 1000, 1000 + BACKLOG + 128),
        (-1, -1, 1000, None),
        (1024, 1024, 1024 - BACKLOG - 128, 1024),
        (256, 256, 1, 256),
    ],
)
def test_open_files(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, expected: int, raised: int | None) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    assert fit_connections(1000) == expected
    assert limits == ([] if raised is None else [(raised, hard)])
