"""Sinks: copies of a run's metrics, events and samples at other services, each in a thread of its own.

A sink is a section in a module of its own, which opens its logger, and a row of `SINKS`: the table ``[logging.NAME]``
of the row's name. A table that a config does not have leaves the sink off.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from logger.run_logger import Metrics, RunLogger, Sink, SinkRun
from logger.tensorboard import TensorBoardConfig
from logger.weights_and_biases import WandbConfig

SINKS: dict[str, type[Sink]] = {"wandb": WandbConfig, "tensorboard": TensorBoardConfig}
"""Key in ``[logging]`` -> section."""

StartLogger = Callable[[Callable[[str], None]], RunLogger]
"""Creates a logger; it gets a function that prints messages."""
LogEvent = Callable[[int, str], None]
"""Takes the step and a message."""


def open_sinks(config: object, directory: Path, step: int, values: dict[str, Any], log: LogEvent) -> list[RunLogger]:
    """Open the sinks that are configured, each in a thread of its own.

    A missing package is logged, and the run continues without that sink.

    Args:
        config: ``[logging]``.
        directory: directory of the run.
        step: step that the run resumes from; 0: it is new.
        values: resolved config of the run.
        log: logs errors.
    """
    sinks: list[RunLogger] = []
    for name in SINKS:
        sink: Sink | None = getattr(config, name)
        if sink is None or not sink.is_on:
            continue
        package = sink.package
        if package is not None and importlib.util.find_spec(package) is None:  # importing it may take seconds
            text = f"[logging.{name}] needs the package {package}, which is not installed (uv sync --extra {package}); "
            log(step, f"{text}the run continues, and metrics.jsonl has all")
            continue
        start = partial(sink.open, SinkRun(directory, step, values))
        sinks.append(BackgroundLogger(sink.title, start, log, sink.finish_seconds))
    return sinks


class BackgroundLogger(RunLogger):
    """A logger in a thread of its own.

    The first error of the logger is logged by the thread of the run, and later calls are still tried. A logger that
    cannot be started is logged and then ignored.
    """

    def __init__(self, name: str, start: StartLogger, log: LogEvent, finish_seconds: float = 60.0) -> None:
        """Start the thread.

        Args:
            name: name of the logger in messages.
            start: creates the logger; called in the thread, so it may be slow.
            log: logs errors.
            finish_seconds: the longest time that `close` waits.
        """
        self._name, self._log, self._finish_seconds = name, log, finish_seconds
        self._calls: SimpleQueue[Callable[[RunLogger], None] | None] = SimpleQueue()
        self._problems: SimpleQueue[str] = SimpleQueue()
        self._num_failures = 0
        self._step = 0
        # A daemon: a logger that hangs on the network must not keep the process alive.
        self._thread = threading.Thread(target=self._work, args=(start,), name=name, daemon=True)
        self._thread.start()

    def metrics(self, step: int, values: Metrics) -> None:
        copy = dict(values)  # the run may change its own before the thread reads them
        self._enqueue(step, lambda logger: logger.metrics(step, copy))

    def event(self, step: int, kind: str, text: str, values: Metrics | None = None) -> None:
        self._enqueue(step, lambda logger: logger.event(step, kind, text, values))

    def progress(self, step: int, values: Metrics) -> None:
        """Log pending errors; progress itself is only shown in terminals."""
        self._step = step
        self._log_problems()

    def close(self, exit_code: int = 0) -> None:
        """Close the logger and wait for it, at most ``finish_seconds``."""
        self._enqueue(self._step, lambda logger: logger.close(exit_code))
        self._calls.put(None)
        self._thread.join(self._finish_seconds)
        self._log_problems()
        if self._thread.is_alive():
            duration = f"{self._finish_seconds:g} s"
            self._log(
                self._step, f"{self._name} did not finish within {duration} and is abandoned; metrics.jsonl has all"
            )
        elif self._num_failures > 1:
            self._log(self._step, f"{self._name} failed {self._num_failures} times; metrics.jsonl has all")

    def _enqueue(self, step: int, call: Callable[[RunLogger], None]) -> None:
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
        except BaseException as error:  # a package that raises SystemExit must not end the run
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
            message = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
            self._problems.put(f"{self._name}: {message}; the run continues, and metrics.jsonl has all")
