"""What the routes share: the engine, the model's names, limits, keys, counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

from config.serving.server import ServeSection
from diffusionlm.serving.daemon_threads import DaemonThreads
from diffusionlm.serving.engine import Engine
from diffusionlm.serving.http.context import RequestContext
from diffusionlm.serving.http.errors import RETRY_AFTER_SECONDS, ApiError, to_api_error
from diffusionlm.serving.http.keys import ApiKeys
from diffusionlm.serving.http.metrics import ServerMetrics
from diffusionlm.serving.http.preparation import RequestPreparer
from diffusionlm.serving.requests import QueueFullError

T = TypeVar("T")

_PREPARATION_THREADS = 4
_CONSTRAINT_THREADS = 2
"""For requests with constraints, whose compilation may take seconds, so that all others do not wait for it."""


class Service:
    """A model that is served."""

    def __init__(self, engine: Engine, preparer: RequestPreparer, limits: ServeSection, keys: ApiKeys | None) -> None:
        self.engine, self.preparer, self.limits, self.keys = engine, preparer, limits, keys
        self.metrics = ServerMetrics(preparer.names)
        self.is_draining = False
        """No request is accepted anymore."""
        self.num_active = 0
        """Requests that decode, or wait for it."""
        self.num_preparing = 0
        """Those of them that the engine has not been given yet."""
        self.uploads: set[asyncio.Timeout] = set()
        """Times of the bodies that are being read."""
        self._threads = DaemonThreads(_PREPARATION_THREADS, "diffusionlm-prepare")
        self._constraint_threads = DaemonThreads(_CONSTRAINT_THREADS, "diffusionlm-constrain")

    def begin_to_drain(self) -> None:
        """Accept no more requests, also none whose body is being read."""
        self.is_draining = True
        for timeout in self.uploads:
            if not timeout.expired():
                timeout.reschedule(0.0)

    def check_is_ready(self) -> None:
        """
        Raises:
            ApiError: the server is about to end, or its engine has ended.
        """
        if self.is_draining:
            retry = {"Retry-After": str(RETRY_AFTER_SECONDS)}
            raise ApiError(503, "the server is about to end", code="draining", headers=retry)
        if not self.engine.is_alive:
            raise ApiError(
                503, "an error has ended the engine: the server has to be started again", code="engine_stopped"
            )

    @asynccontextmanager
    async def upload(self) -> AsyncIterator[None]:
        """Context in which the body of a request is read.

        Raises:
            ApiError: it was not complete in time, or before the server began to end.
        """
        seconds = self.limits.body_timeout_seconds
        try:
            async with asyncio.timeout(seconds) as timeout:
                self.uploads.add(timeout)
                try:
                    yield
                finally:
                    self.uploads.remove(timeout)
        except TimeoutError:
            self.check_is_ready()
            raise ApiError(408, f"the body was not complete after {seconds:g} s", code="body_timeout") from None

    @contextmanager
    def preparation(self) -> Iterator[None]:
        """Context in which a request is prepared. Its body is in memory, so they are as many as the engine accepts.

        Raises:
            ApiError: there are as many already, or too many wait.
        """
        limit = self.limits.max_requests + self.limits.max_waiting
        try:
            if self.num_preparing >= limit:
                raise QueueFullError(f"{limit} requests are being prepared: try again later")
            self.engine.check_capacity(1)
        except QueueFullError as error:
            self.metrics.record_rejection(self.preparer.names[0])  # which one it names is not known yet
            raise to_api_error(error) from None
        self.num_preparing += 1
        try:
            yield
        finally:
            self.num_preparing -= 1

    def check_is_healthy(self) -> None:
        """
        Raises:
            ApiError: the server is about to end, its engine has ended, or a step takes too long.
        """
        self.check_is_ready()
        seconds, limit = self.engine.step_seconds, self.limits.stall_seconds
        if seconds > limit:
            raise ApiError(
                503, f"a forward has not ended for {seconds:.0f} s (serve.stall_seconds = {limit:g})",
                code="engine_stalled",
            )  # fmt: skip

    async def run_in_thread(
        self, function: Callable[[], T], context: RequestContext | None = None, *, has_constraint: bool = False
    ) -> T:
        """Run what takes long beside the event loop; requests with constraints have threads of their own.

        Args:
            context: the request, whose owner takes turns with the others'.
        """
        threads = self._constraint_threads if has_constraint else self._threads
        if context is None:
            return await threads.run(function)
        return await threads.run(function, owner=context.owner, size=context.body_size)

    def close(self) -> None:
        """End the engine at once, and the threads without a wait; requests that are not done end with an error."""
        self.engine.close(drain=False)
        self._threads.close()
        self._constraint_threads.close()
