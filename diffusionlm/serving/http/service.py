"""What the routes share: the engine, the model's names, limits, keys, counts, and threads beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from config.serving.server import ServeSection
from diffusionlm.models.row_adapters import ModelAdapter
from diffusionlm.serving.engine import Engine, release_team
from diffusionlm.serving.http.access import ApiKeys
from diffusionlm.serving.http.metrics import ServerMetrics
from diffusionlm.serving.http.preparation import RequestPreparer
from diffusionlm.serving.http.wire import ApiError, retry_later, shorten
from diffusionlm.serving.requests import UnknownAdapterError

T = TypeVar("T")

_PREPARATION_THREADS = 4
_CONSTRAINT_THREADS = 2
"""For requests with constraints, whose compilation may take seconds, so that all others do not wait for it."""


class DaemonThreads:
    """Runs functions in a fixed number of threads, which the end of the process does not wait for, unlike for those of
    `concurrent.futures.ThreadPoolExecutor`. Owners take turns, so that many functions of one hold up nobody else's."""

    def __init__(self, count: int, name: str) -> None:
        self._condition = threading.Condition()
        self._tasks: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}
        """Owner -> results and functions. The owner whose turn it is comes first."""
        self._is_closed = False
        for number in range(count):
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True).start()

    async def run(self, function: Callable[[], T], owner: str = "") -> T:
        """Wait for a function without holding up the event loop; a cancelled one does not start."""
        future: Future[T] = Future()
        with self._condition:
            self._tasks.setdefault(owner, deque()).append((future, function))
            self._condition.notify()
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End each thread after what it is doing, and after what was asked for before."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    def _work(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._tasks or self._is_closed)
                if not self._tasks:
                    return
                owner = next(iter(self._tasks))
                tasks = self._tasks.pop(owner)
                future, function = tasks.popleft()
                if tasks:
                    self._tasks[owner] = tasks  # now behind all other owners
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)


class Service:
    """A model that is served.

    Args:
        read_adapter: reads the adapter of a directory for the engine's model; raises a ValueError. None: none is read.
    """

    def __init__(
        self,
        engine: Engine,
        preparer: RequestPreparer,
        limits: ServeSection,
        keys: ApiKeys | None,
        read_adapter: Callable[[Path], ModelAdapter] | None = None,
    ) -> None:
        self.engine, self.preparer, self.limits, self.keys = engine, preparer, limits, keys
        self._read_adapter = read_adapter
        self.metrics = ServerMetrics(preparer.names)
        self.threads = DaemonThreads(_PREPARATION_THREADS, "diffusionlm-prepare")
        self.constraint_threads = DaemonThreads(_CONSTRAINT_THREADS, "diffusionlm-constrain")
        self._adapter_thread = DaemonThreads(1, "diffusionlm-adapters")
        self.is_draining = False
        """No request is accepted anymore."""
        self.num_active = 0
        """Requests that are prepared, decoded or answered, or wait for it."""
        self._num_preparing = 0
        self.uploads: set[asyncio.Timeout] = set()
        """Times of the bodies that are being read."""

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
            raise retry_later(503, "the server is about to end", "draining")
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
    def activity(self) -> Iterator[None]:
        """Context of a request from its body to the end of its answer."""
        self.num_active += 1
        try:
            yield
        finally:
            self.num_active -= 1

    @contextmanager
    def preparation(self) -> Iterator[None]:
        """Context in which a request is prepared. Its body is in memory, so one that the engine would refuse beside
        those that are prepared already is not prepared.

        Raises:
            QueueFullError: too many requests are prepared or wait.
        """
        self.engine.check_capacity(self._num_preparing + 1)
        self._num_preparing += 1
        try:
            yield
        finally:
            self._num_preparing -= 1

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

    async def load_adapter(self, name: str, path: str, *, replaces: bool) -> None:
        """Serve an adapter of `serve.adapter_directory` as a model; requests are decoded meanwhile.

        Raises:
            ApiError: the name is in use, there are too many adapters, or this one cannot be read.
        """
        with self.activity():
            await self._adapter_thread.run(partial(self._load_adapter, name, path, replaces))
        self._update_names()

    def unload_adapter(self, name: str) -> None:
        """Accept no more requests of an adapter; those that it has are finished.

        Raises:
            ApiError: there is none of this name.
        """
        try:
            self.engine.unload_adapter(name)
        except UnknownAdapterError:
            text = (
                f"lora_name = {name!r} is not loaded: the server has {', '.join(self.engine.adapter_names) or 'none'}"
            )
            raise ApiError(404, text, param="lora_name", code="model_not_found") from None
        self._update_names()

    def _load_adapter(self, name: str, path: str, replaces: bool) -> None:
        names, limit = self.engine.adapter_names, self.limits.max_adapters
        if name == self.preparer.names[0] or (name in names and not replaces):
            remedy = "send another name, or load_inplace = true to replace an adapter"
            raise ApiError(400, f"lora_name = {name!r} is loaded already: {remedy}", param="lora_name")
        if name not in names and len(names) >= limit:
            text = f"{len(names)} adapters are loaded (serve.max_adapters = {limit}): unload one first"
            raise ApiError(400, text, param="lora_name")
        assert self._read_adapter is not None and self.limits.adapter_directory is not None
        root = self.limits.adapter_directory.resolve()
        try:
            directory = (root / path).resolve()
            if not directory.is_relative_to(root):
                raise ValueError("it is not below serve.adapter_directory, where links are resolved")
            self.engine.load_adapter(name, self._read_adapter(directory))
        except (ValueError, OSError) as error:
            problem = str(error).replace(f"{root}/", "")  # clients need not know the server's directories
            raise ApiError(400, f"lora_path = {shorten(path)!r}: {problem}", param="lora_path") from None
        finally:
            release_team()  # of this thread, which has computed

    def _update_names(self) -> None:
        self.preparer.names = (self.preparer.names[0], *self.engine.adapter_names)

    def close(self) -> None:
        """End the engine at once, and the threads without a wait; requests that are not done end with an error."""
        self.engine.close(drain=False)
        self.threads.close()
        self.constraint_threads.close()
        self._adapter_thread.close()
