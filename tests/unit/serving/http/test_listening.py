"""Addresses."""

from __future__ import annotations

from diffusionlm.serving.http.access import format_url, is_loopback


def test_addresses() -> None:
    names = ("localhost", "127.0.0.1", "127.1.2.3", "::1", "[::1]", "0.0.0.0", "::", "example.org", "10.0.0.1")
    assert [is_loopback(name) for name in names] == [True] * 5 + [False] * 4
    assert format_url("::1", 80) == format_url("[::1]", 80) == "http://[::1]:80"
    assert format_url("localhost", 80) == "http://localhost:80"
