"""Loggers to the console: a progress bar or text lines, or JSON lines for programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TextIO

from files.resilient_stream import discard_pending_output
from files.terminal_text import print_line
from logger.jsonl import format_metrics_line
from logger.progress import ProgressMeter
from logger.run_logger import Metrics, RunLogger


class ConsoleLogger(RunLogger):
    """Shows a progress bar in a terminal, and prints lines elsewhere."""

    def __init__(self, total_steps: int, done: int, style: Literal["bar", "lines", "none"], stream: TextIO) -> None:
        self._stream, self._style, self._total_steps = stream, style, total_steps
        self._meter: ProgressMeter | None = None
        if style == "bar":
            self._meter = ProgressMeter(stream, style="bar")
            self._meter.begin("training", "steps", total_steps, done)

    def metrics(self, step: int, values: Metrics) -> None:
        """Print loss, speed and remaining time, unless there is a bar."""
        if self._style == "lines" and "loss" in values:
            self._print(
                f"step {step}/{self._total_steps}  loss {values['loss']:.4f}  {values['tokens_per_second']:,.0f} "
                f"tokens/s  {format_duration(values['seconds_left'])} left"
            )

    def event(self, step: int, kind: str, text: str, values: Metrics | None = None) -> None:
        """Print the text, above the bar if there is one."""
        self._print(text)

    def progress(self, step: int, values: Metrics) -> None:
        """Set the bar to ``step`` and show loss and speed beside it."""
        if self._meter is not None:
            self._meter.set_postfix(f"loss {values['loss']:.3f}, {values['tokens_per_second']:,.0f} tokens/s")
            self._meter.set(step)

    def close(self, exit_code: int = 0) -> None:
        """End the bar; it stays visible."""
        if self._meter is not None:
            self._meter.close()

    def _print(self, text: str) -> None:
        if self._meter is not None:
            self._meter.log(text)
        elif self._style == "lines":
            print_line(text, self._stream)


class JsonConsole(RunLogger):
    """Prints the metrics lines of ``metrics.jsonl`` for programs. Events go to standard error by another logger.

    A closed pipe (``| head``) ends the output silently; another write error is logged once. Neither ends the run.
    """

    def __init__(self, stream: TextIO, log: Callable[[int, str], None]) -> None:
        """``log`` takes the step and a message."""
        self._stream: TextIO | None = stream
        self._log = log

    def metrics(self, step: int, values: Metrics) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(format_metrics_line(step, values) + "\n")
            self._stream.flush()
        except OSError as error:
            discard_pending_output(self._stream)
            self._stream = None
            if not isinstance(error, BrokenPipeError):
                self._log(
                    step, f"standard output cannot be written ({error}); the run continues, and metrics.jsonl has all"
                )


def format_duration(seconds: float) -> str:
    """Format as ``1:02:03``, ``2:03`` or ``3 s``."""
    total = max(0, round(seconds))
    hours, minutes = total // 3600, total // 60 % 60
    if hours:
        return f"{hours}:{minutes:02}:{total % 60:02}"
    return f"{minutes}:{total % 60:02}" if minutes else f"{total} s"
