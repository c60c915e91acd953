"""The server: a socket, uvicorn, and how it ends."""

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
from typing import cast

import uvicorn

from diffusionlm.serving.http.access import BACKLOG
from diffusionlm.serving.http.app import ServerApp
from diffusionlm.serving.http.endpoints import DISCARD_SECONDS
from diffusionlm.serving.http.guarded_protocol import GuardedProtocol
from diffusionlm.serving.http.service import Service
from files.stop_signals import list_stop_signals

LOGGER = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
_LAST_WORDS_SECONDS = 2.0
"""Time for the errors of requests that were not done in time."""


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
    """Serves until `stop` is called or a signal arrives, then lets the requests that it has accepted end.

    Args:
        on_ready: called when connections are accepted.
    """

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
            backlog=BACKLOG,
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
