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

HANDLED_SIGNALS = (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)
"""In ascending order of their numbers."""

DUPLICATE_SIGNAL_SECONDS = 1.0
"""A batch system tells all processes of a job, and torchrun, which it tells as well, passes it on to its ranks: what
reaches one of several ranks so soon after the first signal is the same request."""


class StoppedError(Exception):
    """A signal ended what had not to be finished."""


class StopRequest:
    """A context in which signals are remembered.

    With several ranks a signal may reach one of them alone, or each in another step. So they agree: each gives its
    `flags`, and takes `agree` of their sums over all ranks.
    """

    def __init__(self, is_distributed: bool = False) -> None:
        """``is_distributed``: several ranks stop together, so that what this one received has to be agreed upon first."""
        self.signal: int | None = None
        """What the run stops for."""
        self.received_signal: int | None = None
        """What this process received."""
        self._is_distributed = is_distributed
        self._received_at = 0.0
        self._previous_handlers: dict[int, Any] = {}
        self._is_interruptible = False

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._previous_handlers = {number: signal.signal(number, self._handle_signal) for number in HANDLED_SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Around what can be done again: there a signal ends it, also one that came before. Not with several ranks,
        none of which may leave the others alone.

        Raises:
            StoppedError: a signal came.
        """
        self._is_interruptible = not self._is_distributed
        try:
            if self._is_interruptible and self.received_signal is not None:
                raise StoppedError
            yield
        finally:
            self._is_interruptible = False

    def flags(self) -> list[float]:
        """Whether each of `HANDLED` was received here, 0 or 1."""
        return [float(self.received_signal == number) for number in HANDLED_SIGNALS]

    def stop_for_any_rank(self, counts: Sequence[float]) -> None:
        """Stop for the largest signal that any rank received, if one did.

        Args:
            counts: the flags, summed over ranks.
        """
        for number, count in zip(HANDLED_SIGNALS, counts, strict=True):
            if count:
                self.signal = int(number)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received_signal is not None:
            if self._is_distributed and now < self._received_at + DUPLICATE_SIGNAL_SECONDS:
                return
            raise KeyboardInterrupt
        self.received_signal, self._received_at = number, now
        if not self._is_distributed:
            self.signal = number
        if self._is_interruptible:
            raise StoppedError
