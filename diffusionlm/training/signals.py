"""SIGINT, SIGTERM and SIGUSR1 ask a run to finish its step and save; a second one ends it at once.

SIGUSR1 is what Slurm sends before a job's time is over (``sbatch --signal=USR1@120``).
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

HANDLED = (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)
"""In ascending order of their numbers."""

ECHO_SECONDS = 1.0
"""A batch system tells all processes of a job, and torchrun, which it tells as well, passes it on to its ranks: what
reaches one of several ranks so soon after the first signal is the same request."""


class StoppedError(Exception):
    """A signal ended what had not to be finished."""


class StopRequest:
    """A context in which signals are remembered.

    With several ranks a signal may reach one of them alone, or each in another step. So they agree: each gives its
    `flags`, and takes `agree` of their sums over all ranks.
    """

    def __init__(self, is_shared: bool = False) -> None:
        """``is_shared``: several ranks stop together, so that what this one received has to be agreed upon first."""
        self.signal: int | None = None
        """What the run stops for."""
        self.received: int | None = None
        """What this process received."""
        self._is_shared = is_shared
        self._received_at = 0.0
        self._before: dict[int, Any] = {}
        self._is_at_once = False

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._remember) for number in HANDLED}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Around what can be done again: there a signal ends it, also one that came before. Not with several ranks,
        none of which may leave the others alone.

        Raises:
            StoppedError: a signal came.
        """
        self._is_at_once = not self._is_shared
        try:
            if self._is_at_once and self.received is not None:
                raise StoppedError
            yield
        finally:
            self._is_at_once = False

    def flags(self) -> list[float]:
        """Whether each of `HANDLED` was received here, 0 or 1."""
        return [float(self.received == number) for number in HANDLED]

    def agree(self, counts: Sequence[float]) -> None:
        """Stop for the largest signal that any rank received, if one did.

        Args:
            counts: the flags, summed over ranks.
        """
        for number, count in zip(HANDLED, counts, strict=True):
            if count:
                self.signal = int(number)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is not None:
            if self._is_shared and now < self._received_at + ECHO_SECONDS:
                return
            raise KeyboardInterrupt
        self.received, self._received_at = number, now
        if not self._is_shared:
            self.signal = number
        if self._is_at_once:
            raise StoppedError
