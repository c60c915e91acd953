"""Progress of long work: a bar in a terminal, occasional lines elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal, TextIO

from files.terminal_text import accepts_escapes, escape_control_characters, print_line
from logger.pages.terminal import make_console

if TYPE_CHECKING:
    from rich.progress import Progress

SECONDS_BETWEEN_LINES = 15.0
SECONDS_BETWEEN_DRAWINGS = 0.1
SPEED_SECONDS = 3600.0
"""The remaining time is estimated from the speed of the last 1,000 drawings, but of no more than this time."""


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
        delay_seconds: a phase that takes less time shows nothing.
        leave: False: the bar is erased at the end of a phase, and no last line is printed.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        style: Literal["auto", "bar", "lines"] = "auto",
        delay_seconds: float = 0.0,
        leave: bool = True,
    ) -> None:
        self._stream = stream
        self._has_bar = console_style(style, stream) == "bar"
        self._delay_seconds, self._leave = delay_seconds, leave
        self._bar: Progress | None = None
        self.name: str | None = None
        """Name of the current phase; None: there is none."""

    def begin(self, name: str, unit: str, total: int | None = None, initial: int = 0) -> None:
        """End the current phase and start one of ``total`` units (None: unknown), ``initial`` of which are done."""
        self.close()
        self.name, self._unit, self._total = name, unit, total
        self._done, self._initial, self._postfix = initial, initial, ""
        self._started_at = self._last_shown_at = time.monotonic()
        if self._has_bar and self._delay_seconds == 0.0:
            self._draw()

    def set(self, done: int) -> None:
        """Set the number of units of the phase that are done."""
        self._done = done
        seconds = time.monotonic() - self._last_shown_at
        if not self._has_bar:
            if seconds > SECONDS_BETWEEN_LINES:
                self._print_line()
        elif seconds > (SECONDS_BETWEEN_DRAWINGS if self._bar is not None else self._delay_seconds):
            self._draw()

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
        if self._bar is not None:
            self._draw()
            self._bar.stop()
        elif (
            self.name is not None
            and self._leave
            and not self._has_bar
            and time.monotonic() - self._started_at >= self._delay_seconds
        ):
            self._print_line()
        self._bar, self.name = None, None

    def _draw(self) -> None:
        """Draw the bar. Nothing is drawn by another thread, so a process may be forked at any time."""
        self._last_shown_at = time.monotonic()
        if self._bar is None:
            self._bar = _start_bar(self._stream, has_total=self._total is not None, leave=self._leave)
            self._bar.add_task(self.name or "", total=self._total, completed=self._initial, status="")
        status = escape_control_characters(self._describe())
        self._bar.update(self._bar.task_ids[0], completed=self._done, status=status, refresh=True)

    def _print_line(self) -> None:
        self._last_shown_at = time.monotonic()
        self.log(f"{self.name}: {self._describe()}")

    def _describe(self) -> str:
        seconds = self._last_shown_at - self._started_at
        of_total = "" if self._total is None else f" of {self._total:,}"
        rate = (self._done - self._initial) / seconds if seconds > 0 else 0.0
        speed = f", {rate:,.{2 if rate < 100 else 0}f} {self._unit}/s" if rate else ""
        postfix = f", {self._postfix}" if self._postfix else ""
        return f"{self._done:,}{of_total} {self._unit}{speed}{postfix}"


def _start_bar(stream: TextIO, *, has_total: bool, leave: bool) -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        *([BarColumn(bar_width=None), TimeRemainingColumn(elapsed_when_finished=True)] if has_total else []),
        TextColumn("{task.fields[status]}", markup=False),
        console=make_console(stream, is_forced=True),
        auto_refresh=False,
        redirect_stdout=False,  # results may be piped
        transient=not leave,
        speed_estimate_period=SPEED_SECONDS,
        get_time=time.monotonic,
        expand=has_total,
    )
    bar.start()
    bar.console.show_cursor(True)  # a process that is killed would leave it hidden
    return bar
