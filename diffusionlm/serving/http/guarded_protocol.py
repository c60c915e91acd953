"""HTTP connections with limits that uvicorn does not have: their number, the time for headers and for responses."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from config.serving.server import ServeSection
from diffusionlm.serving.http.wire import ApiError, retry_later, to_json

PROBE_PATHS = frozenset({"/health", "/metrics"})
"""Paths that are answered beyond ``max_connections``, so that a full server does not look like a dead one."""
MAX_PROBES = 32
"""Connections for them."""
IS_PROBE_KEY = "is_probe"
_SEND_BUFFER_BYTES = 1 << 17
"""Of the system, which reports room by thirds of it: a large one hides for long what a slow reader has read."""


def too_many_connections() -> ApiError:
    error = retry_later(503, "too many connections", "too_many_connections")
    error.headers["Connection"] = "close"
    return error


class GuardedProtocol(H11Protocol):
    """A connection; what is refused before there is a request is answered in JSON as well."""

    def __init__(self, limits: ServeSection, **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits
        self._timers: dict[str, asyncio.TimerHandle] = {}
        """headers: runs until they are complete. reader: runs while there is something that the client has to read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that `pause_writing` is called whenever something waits
        num_probes = len(self.connections) - self._limits.max_connections
        self.app_state = {**self.app_state, IS_PROBE_KEY: num_probes > 0}
        with suppress(OSError):  # macOS: the client has left already
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        if num_probes > MAX_PROBES:
            self._refuse(too_many_connections())
        else:
            self._watch_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer("headers")
        self._stop_timer("reader")
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._stop_timer("reader")
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer("headers")
        elif "headers" not in self._timers and not self.transport.is_closing():
            self._watch_headers()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, or has headers that are too long."""
        size = self._limits.max_header
        self._refuse(ApiError(400, f"this is not valid HTTP, or its headers are longer than {size} bytes"))

    def _watch_headers(self) -> None:
        self._timers["headers"] = self.loop.call_later(self._limits.header_timeout_seconds, self._refuse_slow_headers)

    def _watch_reader(self) -> None:
        size = self.transport.get_write_buffer_size()
        self._timers["reader"] = self.loop.call_later(self._limits.write_timeout_seconds, self._check_reader, size)

    def _check_reader(self, size: int) -> None:
        """End the connection if nothing was read of so many bytes."""
        if self.transport.get_write_buffer_size() < size:
            self._watch_reader()
        else:
            self.transport.abort()  # `close` would wait for the client

    def _stop_timer(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()

    def _refuse_slow_headers(self) -> None:
        seconds = self._limits.header_timeout_seconds
        self._refuse(ApiError(408, f"the headers were not complete after {seconds:g} s", code="header_timeout"))

    def _refuse(self, error: ApiError) -> None:
        """Answer with an error, if no response has begun, and close the connection."""
        self._stop_timer("headers")
        if self.transport.is_closing():
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = to_json(error.body)
            headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
            response = h11.Response(
                status_code=error.status,
                headers=[*(headers | error.headers).items()],
                reason=STATUS_PHRASES[error.status],
            )
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
