"""The server: a socket, uvicorn, connections with limits that uvicorn does not have (their number, the time for headers
and for responses), and how it ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from config.serving.server import ServeSection
from diffusionlm.serving.http.app import ServerApp
from diffusionlm.serving.http.endpoints import DISCARD_SECONDS, IS_PROBE_KEY
from diffusionlm.serving.http.service import Service
from diffusionlm.serving.http.wire import ApiError, to_json, too_many_connections
from files.stop_signals import list_stop_signals

LOGGER = logging.getLogger(__name__)
_BACKLOG = 512
"""Connections that wait to be accepted."""
_POLL_SECONDS = 0.05
_LAST_WORDS_SECONDS = 2.0
"""Time for the errors of requests that were not done in time."""
MAX_PROBES = 32
"""Connections for `PROBE_PATHS` beyond ``max_connections``."""
_SEND_BUFFER_BYTES = 1 << 17
"""Of the system, which reports room by thirds of it: a large one hides for long what a slow reader has read."""


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


class _UvicornServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `ApiServer`."""
        yield


class ApiServer:
    """Serves until `stop` is called or a signal arrives, then lets the requests that it has accepted end."""

    def __init__(self, service: Service, on_ready: Callable[[], None]) -> None:
        self._service = service
        limits = service.limits
        config = uvicorn.Config(
            ServerApp(service),
            http=cast("type[asyncio.Protocol]", partial(GuardedProtocol, limits)),
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            h11_max_incomplete_event_size=limits.max_header,
            timeout_keep_alive=cast("int", limits.keep_alive_seconds),  # for `call_later`, which takes any number
            timeout_graceful_shutdown=max(1, round(_LAST_WORDS_SECONDS + DISCARD_SECONDS)),
        )
        # It writes tracebacks and texts of clients; the application has its own log.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._server = _UvicornServer(config, on_ready)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain_task: asyncio.Task[None] | None = None

    def run(self, bound: socket.socket) -> None:
        """Serve at a bound socket until the end, which a stop signal begins; the second one ends the process."""
        asyncio.run(self._run(bound))

    def stop(self) -> None:
        """Begin the end; may be called from any thread."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: it has ended
                self._loop.call_soon_threadsafe(self._begin_to_drain)

    async def _run(self, bound: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in list_stop_signals():
                self._loop.add_signal_handler(number, self._handle_signal, number)
        try:
            await self._server.serve([bound])
        finally:
            await asyncio.to_thread(self._service.close)

    def _handle_signal(self, number: int) -> None:
        if self._drain_task is not None:
            os._exit(128 + number)
        LOGGER.info("%s: no more requests are accepted", signal.Signals(number).name)
        self._begin_to_drain()

    def _begin_to_drain(self) -> None:
        if self._drain_task is None:
            self._service.begin_to_drain()
            self._drain_task = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        """Wait for the requests that were accepted; end those that are not done in time."""
        if not await self._wait_until_idle(self._service.limits.drain_timeout_seconds):
            LOGGER.warning("%d requests were not done in time", self._service.num_active)
            await asyncio.to_thread(self._service.engine.close, drain=False)
            await self._wait_until_idle(_LAST_WORDS_SECONDS)
        self._server.should_exit = True

    async def _wait_until_idle(self, seconds: float) -> bool:
        deadline = asyncio.get_running_loop().time() + seconds
        while self._service.num_active:
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(_POLL_SECONDS)
        return True
