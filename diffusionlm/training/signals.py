"""The first of `STOP_SIGNALS` stops a run after its step, which it saves; a second signal ends it at once.

Slurm sends SIGUSR1 before a job's time is over (``sbatch --signal=USR1@120``).
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from files.stop_signals import STOP_SIGNALS, list_stop_signals

DUPLICATE_SIGNAL_SECONDS = 1.0
"""A signal so soon after the first one is the same request: batch systems and `timeout` signal all processes of a job,
and torchrun and ``uv run``, which are among them, pass the signal on. Only Ctrl-C twice is meant, by one process."""


class StoppedError(Exception):
    """A signal ended work that can be repeated."""


class StopRequest:
    """Context that handles signals. `signal` is set once the run has to stop.

    With several ranks a signal may reach only one of them, or each in another step. Before every step they all-reduce
    `flags` and pass the sums to `stop_for_any_rank`, so that all stop after the same step.
    """

    def __init__(self, is_distributed: bool = False) -> None:
        """``is_distributed``: there are several ranks, which agree before `signal` is set."""
        self.signal: int | None = None
        """Signal that the run stops for."""
        self.received_signal: int | None = None
        self._is_distributed = is_distributed
        self._received_at = 0.0
        self._previous_handlers: dict[int, Any] = {}
        self._is_interruptible = False

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._previous_handlers = {
                number: signal.signal(number, self._handle_signal) for number in list_stop_signals()
            }
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Context for work that can be repeated: a signal ends it at once, also one that came before. With several
        ranks it is not interrupted, since the others would wait forever.

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
        """For each of `STOP_SIGNALS` 1.0 if this process received it, else 0.0."""
        return [float(self.received_signal == number) for number in STOP_SIGNALS]

    def stop_for_any_rank(self, counts: Sequence[float]) -> None:
        """Set `signal` to the largest signal that any rank received; ``counts`` are the flags, summed over ranks."""
        for number, count in zip(STOP_SIGNALS, counts, strict=True):
            if count:
                self.signal = int(number)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received_signal is not None:
            is_meant = number == signal.SIGINT and not self._is_distributed
            if not is_meant and now < self._received_at + DUPLICATE_SIGNAL_SECONDS:
                return
            raise KeyboardInterrupt
        self.received_signal, self._received_at = number, now
        if not self._is_distributed:
            self.signal = number
        if self._is_interruptible:
            raise StoppedError
