"""Progress of long work, and loggers to the console: a bar in a terminal, lines elsewhere, JSON lines for programs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TextIO

from files.resilient_stream import discard_pending_output
from files.terminal_text import accepts_escapes, escape_control_characters, print_line
from logger.jsonl import format_metrics_line
from logger.pages.terminal import make_console
from logger.run_logger import Metrics, RunLogger

if TYPE_CHECKING:
    from rich.progress import Progress

SECONDS_BETWEEN_LINES = 15.0
SECONDS_BETWEEN_DRAWINGS = 0.1
SPEED_SECONDS = 3600.0
"""The remaining time is estimated from the speed of the last 1,000 drawings, but of no more than this time."""
DELAY_SECONDS = 3.0
"""A transient phase that takes less time shows nothing."""


def console_style(choice: Literal["auto", "bar", "lines", "none"], stream: TextIO) -> Literal["bar", "lines", "none"]:
    """Resolve ``auto``: a bar in a terminal that takes escape sequences, lines elsewhere."""
    if choice != "auto":
        return choice
    return "bar" if accepts_escapes(stream) else "lines"


class ProgressMeter:
    """Counts the units of one phase after the other.

    In a terminal each phase has a bar. Elsewhere a line is printed every `SECONDS_BETWEEN_LINES` and at the end of a
    phase.

    Args:
        stream: where the bar or the lines go.
        style: ``bar`` or ``lines`` overrules the choice by terminal.
        is_transient: the bar appears after `DELAY_SECONDS` and is erased at the end, and no last line is printed.
    """

    def __init__(
        self, stream: TextIO, *, style: Literal["auto", "bar", "lines"] = "auto", is_transient: bool = False
    ) -> None:
        self._stream, self._is_transient = stream, is_transient
        self._has_bar = console_style(style, stream) == "bar"
        self._bar: Progress | None = None
        self.name: str | None = None
        """Name of the current phase; None: there is none."""

    def begin(self, name: str, unit: str, total: int | None = None, initial: int = 0) -> None:
        """End the current phase and start one of ``total`` units (None: unknown), ``initial`` of which are done. Of a
        phase that has begun it changes nothing."""
        if name == self.name:
            return
        self.close()
        self.name, self._unit, self._total = name, unit, total
        self._done, self._initial, self._postfix = initial, initial, ""
        self._started_at = self._last_shown_at = time.monotonic()
        if self._has_bar and not self._is_transient:
            self._show()

    def set(self, done: int) -> None:
        """Set the number of units of the phase that are done."""
        self._done = done
        seconds = SECONDS_BETWEEN_DRAWINGS if self._bar is not None else DELAY_SECONDS
        if time.monotonic() - self._last_shown_at > (seconds if self._has_bar else SECONDS_BETWEEN_LINES):
            self._show()

    def advance(self, name: str, unit: str, done: int, total: int | None) -> None:
        """Set the number of units of a phase that are done, and begin it if it is another one."""
        self.begin(name, unit, total)
        self.set(done)

    def set_postfix(self, text: str) -> None:
        """Set the text behind the counts; it appears with the next update."""
        self._postfix = text

    def log(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(escape_control_characters(text), soft_wrap=True)
        else:
            print_line(text, self._stream)

    def close(self) -> None:
        """End the current phase, if there is one."""
        if self.name is not None and (self._bar is not None or not self._is_transient):
            self._show()
        if self._bar is not None:
            self._bar.stop()
        self._bar = self.name = None

    def _show(self) -> None:
        """Draw the bar, or print a line. No other thread draws, so the process may be forked at any time."""
        self._last_shown_at = time.monotonic()
        if not self._has_bar:
            self.log(f"{self.name}: {self._describe()}")
            return
        if self._bar is None:
            self._bar = _start_bar(self._stream, has_total=self._total is not None, is_transient=self._is_transient)
            self._bar.add_task(self.name or "", total=self._total, completed=self._initial, status="")
        status = escape_control_characters(self._describe())
        self._bar.update(self._bar.task_ids[0], completed=self._done, status=status, refresh=True)

    def _describe(self) -> str:
        seconds = self._last_shown_at - self._started_at
        of_total = "" if self._total is None else f" of {self._total:,}"
        rate = (self._done - self._initial) / seconds if seconds > 0 else 0.0
        speed = f", {rate:,.{2 if rate < 100 else 0}f} {self._unit}/s" if rate else ""
        postfix = f", {self._postfix}" if self._postfix else ""
        return f"{self._done:,}{of_total} {self._unit}{speed}{postfix}"


def _start_bar(stream: TextIO, *, has_total: bool, is_transient: bool) -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        *([BarColumn(bar_width=None), TimeRemainingColumn(elapsed_when_finished=True)] if has_total else []),
        TextColumn("{task.fields[status]}", markup=False),
        console=make_console(stream, is_forced=True),
        auto_refresh=False,
        redirect_stdout=False,  # results may be piped
        transient=is_transient,
        speed_estimate_period=SPEED_SECONDS,
        get_time=time.monotonic,
        expand=has_total,
    )
    bar.start()
    bar.console.show_cursor(True)  # a process that is killed would leave it hidden
    return bar


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
                f"step {step}/{self._total_steps}  {_format_aim(values, 4)}  {values['tokens_per_second']:,.0f} "
                f"tokens/s  {format_duration(values['seconds_left'])} left"
            )

    def event(self, step: int, kind: str, text: str, values: Metrics | None = None) -> None:
        """Print the text, above the bar if there is one."""
        self._print(text)

    def progress(self, step: int, values: Metrics) -> None:
        """Set the bar to ``step`` and show loss and speed beside it."""
        if self._meter is not None:
            self._meter.set_postfix(f"{_format_aim(values, 3)}, {values['tokens_per_second']:,.0f} tokens/s")
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


def _format_aim(values: Metrics, digits: int) -> str:
    """The loss, or of a policy gradient the mean reward, which its loss says nothing of."""
    name, key = ("reward", "rl/reward") if "rl/reward" in values else ("loss", "loss")
    return f"{name} {values[key]:.{digits}f}"
