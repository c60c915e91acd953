"""Sinks: copies of a run's metrics, events and samples at other services.

A sink is a class in a module of its own and a row of `SINKS`. Its options are the table ``[logging.NAME]`` of the row's
name; a table that a config does not have leaves the sink off.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

from logger.background import BackgroundLogger, LogEvent
from logger.run_logger import RunLogger, Sink, SinkRun
from logger.tensorboard import TensorBoardLogger
from logger.weights_and_biases import WandbLogger

SINKS: dict[str, type[Sink[Any]]] = {"wandb": WandbLogger, "tensorboard": TensorBoardLogger}
"""Key in ``[logging]`` -> class."""


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
    for name, sink in SINKS.items():
        options = getattr(config, name)
        if options is None or not options.is_on:
            continue
        package = sink.package
        if package is not None and importlib.util.find_spec(package) is None:  # importing it may take seconds
            text = f"[logging.{name}] needs the package {package}, which is not installed (uv sync --extra {package}); "
            log(step, f"{text}the run continues, and metrics.jsonl has all")
            continue
        start = partial(sink, options, SinkRun(directory, step, values))
        sinks.append(BackgroundLogger(sink.title, start, log, options.finish_seconds))
    return sinks
