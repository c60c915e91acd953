"""Loggers that may be slow or fail, kept away from the run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from logger.run_logger import Metrics, RunLogger

LoggerCall = Callable[[RunLogger], None]
StartLogger = Callable[[Callable[[str], None]], RunLogger]
"""Makes a logger; what it has to say meanwhile goes to what it is given."""
LogEvent = Callable[[int, str], None]
"""Takes the step and what went wrong."""


class BackgroundLogger:
    """A logger in a thread of its own, which neither ends a run nor holds up its steps.

    Whatever it raises is told once, by the thread of the run, and what comes later is tried all the same. One that
    cannot be started is told of, and has nothing more to do.
    """

    def __init__(self, name: str, start: StartLogger, log: LogEvent, finish_seconds: float = 60.0) -> None:
        """Begin to start it.

        Args:
            name: for people.
            start: makes the logger, and may take its time; called in the thread.
            tell: says what went wrong.
            finish_seconds: so long `close` waits.
        """
        self._name, self._log, self._finish_seconds = name, log, finish_seconds
        self._calls: SimpleQueue[LoggerCall | None] = SimpleQueue()
        self._problems: SimpleQueue[str] = SimpleQueue()
        self._num_failures = 0
        self._step = 0
        # A daemon: a process does not wait for what hangs behind a network.
        self._thread = threading.Thread(target=self._work, args=(start,), name=name, daemon=True)
        self._thread.start()

    def metrics(self, step: int, values: Metrics) -> None:
        """For the thread."""
        kept = dict(values)
        self._enqueue(step, lambda logger: logger.metrics(step, kept))

    def event(self, step: int, kind: str, text: str, values: Metrics | None = None) -> None:
        """For the thread."""
        self._enqueue(step, lambda logger: logger.event(step, kind, text, values))

    def progress(self, step: int, values: Metrics) -> None:
        """Nothing but telling what went wrong: progress is for people."""
        self._step = step
        self._log_problems()

    def close(self, exit_code: int = 0) -> None:
        """Let it finish, and wait for it, but not for ever."""
        self._enqueue(self._step, lambda logger: logger.close(exit_code))
        self._calls.put(None)
        self._thread.join(self._finish_seconds)
        self._log_problems()
        if self._thread.is_alive():
            self._log(
                self._step,
                f"{self._name} was not done after {self._finish_seconds:g} s and is left alone; metrics.jsonl has all",
            )
        elif self._num_failures > 1:
            self._log(self._step, f"{self._name} failed {self._num_failures} times; metrics.jsonl has all")

    def _enqueue(self, step: int, call: LoggerCall) -> None:
        self._step = step
        self._log_problems()
        if self._thread.is_alive():
            self._calls.put(call)

    def _log_problems(self) -> None:
        while not self._problems.empty():
            self._log(self._step, self._problems.get())

    def _work(self, start: StartLogger) -> None:
        try:
            logger = start(self._problems.put)
        except BaseException as error:  # what others raise to end a process must not end this one
            self._record_failure(error)
            return
        while (call := self._calls.get()) is not None:
            try:
                call(logger)
            except BaseException as error:
                self._record_failure(error)

    def _record_failure(self, error: BaseException) -> None:
        self._num_failures += 1
        if self._num_failures == 1:
            self._problems.put(
                f"{self._name}: {format_error_first_line(error)}; the run goes on, and metrics.jsonl has all"
            )


def format_error_first_line(error: BaseException) -> str:
    """The kind of an error and the first line of its text."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
