"""Loggers that may be slow or fail, kept away from the run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from logger.run_logger import Metrics, RunLogger

Call = Callable[[RunLogger], None]
Start = Callable[[Callable[[str], None]], RunLogger]
"""Makes a logger; what it has to say meanwhile goes to what it is given."""
Tell = Callable[[int, str], None]
"""Takes the step and what went wrong."""


class BackgroundLogger:
    """A logger in a thread of its own, which neither ends a run nor holds up its steps.

    Whatever it raises is told once, by the thread of the run, and what comes later is tried all the same. One that
    cannot be started is told of, and has nothing more to do.
    """

    def __init__(self, name: str, start: Start, tell: Tell, finish_seconds: float = 60.0) -> None:
        """Begin to start it.

        Args:
            name: for people.
            start: makes the logger, and may take its time; called in the thread.
            tell: says what went wrong.
            finish_seconds: so long `close` waits.
        """
        self._name, self._tell, self._finish_seconds = name, tell, finish_seconds
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._problems: SimpleQueue[str] = SimpleQueue()
        self._failed = 0
        self._step = 0
        # A daemon: a process does not wait for what hangs behind a network.
        self._thread = threading.Thread(target=self._work, args=(start,), name=name, daemon=True)
        self._thread.start()

    def metrics(self, step: int, values: Metrics) -> None:
        """For the thread."""
        kept = dict(values)
        self._give(step, lambda logger: logger.metrics(step, kept))

    def event(self, step: int, kind: str, text: str, values: Metrics | None = None) -> None:
        """For the thread."""
        self._give(step, lambda logger: logger.event(step, kind, text, values))

    def progress(self, step: int, values: Metrics) -> None:
        """Nothing but telling what went wrong: progress is for people."""
        self._step = step
        self._tell_problems()

    def close(self, exit_code: int = 0) -> None:
        """Let it finish, and wait for it, but not for ever."""
        self._give(self._step, lambda logger: logger.close(exit_code))
        self._calls.put(None)
        self._thread.join(self._finish_seconds)
        self._tell_problems()
        if self._thread.is_alive():
            self._tell(
                self._step,
                f"{self._name} was not done after {self._finish_seconds:g} s and is left alone; metrics.jsonl has all",
            )
        elif self._failed > 1:
            self._tell(self._step, f"{self._name} failed {self._failed} times; metrics.jsonl has all")

    def _give(self, step: int, call: Call) -> None:
        self._step = step
        self._tell_problems()
        if self._thread.is_alive():
            self._calls.put(call)

    def _tell_problems(self) -> None:
        while not self._problems.empty():
            self._tell(self._step, self._problems.get())

    def _work(self, start: Start) -> None:
        try:
            logger = start(self._problems.put)
        except BaseException as error:  # what others raise to end a process must not end this one
            self._failure(error)
            return
        while (call := self._calls.get()) is not None:
            try:
                call(logger)
            except BaseException as error:
                self._failure(error)

    def _failure(self, error: BaseException) -> None:
        self._failed += 1
        if self._failed == 1:
            self._problems.put(f"{self._name}: {first_line(error)}; the run goes on, and metrics.jsonl has all")


def first_line(error: BaseException) -> str:
    """The kind of an error and the first line of its text."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
