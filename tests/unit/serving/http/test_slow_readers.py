"""How long a client may take to read, without a clock: the timers of a connection are called by hand."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, cast

import uvicorn
from uvicorn.server import ServerState

from config.serving.server import ServeSection
from diffusionlm.serving.http.server import GuardedProtocol


class Timers:
    """An event loop, of which only `call_later` is needed."""

    def __init__(self) -> None:
        self.pending: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, seconds: float, function: Callable[..., None], *values: Any) -> Any:
        item = (seconds, lambda: function(*values))
        self.pending.append(item)
        return type("Handle", (), {"cancel": lambda _: self.pending.remove(item)})()

    def run_next(self) -> None:
        self.pending.pop()[1]()


class Transport:
    """A connection with so many bytes that the client has still to read."""

    def __init__(self, bound: socket.socket) -> None:
        self.num_unread, self.is_aborted, self._socket = 0, False, bound

    def get_extra_info(self, name: str) -> Any:
        return self._socket if name == "socket" else None

    def set_write_buffer_limits(self, high: int) -> None:
        assert high == 0

    def get_write_buffer_size(self) -> int:
        return self.num_unread

    def abort(self) -> None:
        self.is_aborted = True


def test_readers_that_go_on_stay_and_those_that_stop_are_cut_off() -> None:
    timers = Timers()
    with socket.socket() as bound:
        transport = Transport(bound)
        protocol = GuardedProtocol(
            ServeSection(write_timeout_seconds=7.0),
            config=uvicorn.Config(cast("Any", None), ws="none"),
            server_state=ServerState(),
            app_state={},
            _loop=cast("Any", timers),
        )
        protocol.connection_made(cast("asyncio.Transport", transport))
        assert bound.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 1 << 18  # else progress is seen by megabytes
    timers.pending.clear()  # that of the headers
    transport.num_unread = 1000
    protocol.pause_writing()
    for num_unread in (999, 500, 1):
        transport.num_unread = num_unread
        assert [seconds for seconds, _ in timers.pending] == [7.0]
        timers.run_next()
        assert not transport.is_aborted
    protocol.resume_writing()
    assert not timers.pending
    protocol.pause_writing()
    timers.run_next()
    assert transport.is_aborted and not timers.pending
