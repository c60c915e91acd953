"""Requests of an engine's callers: what they ask for, and their state as they see it."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from diffusionlm.inference.generate import CanvasSnapshot, Generation, take_snapshot, to_generation
from diffusionlm.inference.requests import ActiveRequest, TopLogprobs

LOGGER = logging.getLogger(__name__)


class EngineError(RuntimeError):
    """A request cannot be decoded, for a reason that is not its own."""


class UnknownAdapterError(ValueError):
    """There is no adapter of this name."""


class QueueFullError(EngineError):
    """Too many requests wait already: try again later."""


class EngineStoppedError(EngineError):
    """The engine was closed, or an error has ended it."""


@dataclass(frozen=True)
class RequestState:
    """A request as its caller sees it. Times are those of `time.monotonic`, in seconds."""

    submitted: float
    started: float | None = None
    """Time of the first forward."""
    finished: float | None = None
    token_ids: tuple[int, ...] = ()
    """New tokens from the left that will not change anymore."""
    logprobs: tuple[float, ...] = ()
    """Log-probability of each of these tokens (`Generation.logprobs`)."""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """Alternatives of each token, if the caller has asked for them (`Generation.top_logprobs`)."""
    steps: tuple[int, ...] = ()
    """Forward in which each token was committed, from 1 on (`Generation.step_map`)."""
    canvas: CanvasSnapshot | None = None
    """The whole canvas, if the caller has asked for it."""
    generation: Generation | None = None
    """The answer, once it is complete."""
    error: Exception | None = None
    """Why there will be no answer."""
    num_cached_tokens: int = 0
    """Tokens of the prompt that were in the prefix cache."""
    num_forwards: int = 0
    """Forwards that this request took part in so far."""

    @property
    def is_done(self) -> bool:
        return self.finished is not None


class EngineRequest:
    """A request that an engine decodes; made by `Engine.submit`."""

    def __init__(self, request: ActiveRequest) -> None:
        self._request, self._with_canvas = request, request.prepared.options.with_canvas
        self._condition = threading.Condition()
        self._listeners: list[Callable[[], None]] = []
        self._state = RequestState(time.monotonic())

    @property
    def state(self) -> RequestState:
        return self._state

    def follow(self) -> Iterator[RequestState]:
        """The state, and each later one; the last one is done. A reader that is slow misses those in between."""
        state = self._state
        yield state
        while not state.is_done:
            with self._condition:
                while self._state is state:
                    self._condition.wait()
                state = self._state
            yield state

    def result(self, timeout: float | None = None) -> Generation:
        """Wait for the answer.

        Raises:
            TimeoutError: it was not complete within ``timeout`` seconds.
            Exception: what has ended the request.
        """
        with self._condition:
            if not self._condition.wait_for(lambda: self._state.is_done, timeout):
                raise TimeoutError(f"the request was not complete within {timeout} s")
        if self._state.error is not None:
            # Several callers may wait for this request, and others may have the same error: each raises its own.
            error = copy.copy(self._state.error)
            error.__cause__ = self._state.error.__cause__
            raise error
        assert self._state.generation is not None, "a request ends with an answer or an error"
        return self._state.generation

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call a function after each change, in the thread of the engine; at once if the request is done."""
        with self._condition:
            self._listeners.append(listener)
            is_done = self._state.is_done
        if is_done:
            listener()

    def _update(self, *, is_done: bool = False) -> None:
        """Read the state of the request; with ``is_done`` the answer."""
        request, before = self._request, self._state
        new_positions = request.final_positions()[len(before.token_ids) :]
        now = time.monotonic()
        self._change(
            token_ids=before.token_ids + tuple(request.tokens_L[new_positions].tolist()),
            logprobs=before.logprobs + tuple(request.logprobs_L[new_positions].tolist()),
            top_logprobs=before.top_logprobs + request.top_logprobs_at(new_positions),
            steps=before.steps + tuple(request.step_map_L[new_positions].tolist()),
            canvas=take_snapshot(request) if self._with_canvas else None,
            generation=to_generation(request) if is_done else None,
            num_cached_tokens=request.num_cached_tokens,
            num_forwards=request.num_forwards,
            started=before.started or (now if request.num_forwards else None),
            finished=now if is_done else None,
        )

    def _fail(self, error: Exception) -> None:
        """End the request with an error. It is not read: what is wrong with it may be the reason."""
        self._change(error=error, finished=time.monotonic())

    def _change(self, **changes: Any) -> None:
        with self._condition:
            if self._state.is_done:
                return
            self._state = replace(self._state, **changes)
            self._condition.notify_all()
            listeners = list(self._listeners)
        for listener in listeners:
            try:
                listener()
            except Exception:  # of the caller, such as a closed event loop; the others' requests go on
                LOGGER.exception("a listener of a request has failed")
