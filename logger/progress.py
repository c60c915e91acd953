"""Progress of long work: a bar in a terminal, occasional lines elsewhere."""

from __future__ import annotations

import time
from typing import Literal, TextIO

from tqdm import tqdm

from files.terminal_text import escape_control_characters, print_line

SECONDS_BETWEEN_LINES = 15.0


def console_style(choice: Literal["auto", "bar", "lines", "none"], stream: TextIO) -> Literal["bar", "lines", "none"]:
    """Resolve ``auto``: a bar in a terminal, lines elsewhere."""
    if choice != "auto":
        return choice
    return "bar" if stream.isatty() else "lines"


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
        self._bar: tqdm[object] | None = None
        self.name: str | None = None
        """Name of the current phase; None: there is none."""

    def begin(self, name: str, unit: str, total: int | None = None, initial: int = 0) -> None:
        """End the current phase and start one of ``total`` units (None: unknown), ``initial`` of which are done."""
        self.close()
        self.name, self._unit, self._total = name, unit, total
        self._done, self._initial, self._postfix = initial, initial, ""
        self._started_at = self._last_line_at = time.monotonic()
        if self._has_bar:
            self._bar = tqdm(
                desc=name or None,
                unit=f" {unit}",
                unit_scale=True,
                total=total,
                initial=initial,
                file=self._stream,
                dynamic_ncols=True,
                delay=self._delay_seconds,
                leave=self._leave,
            )

    def set(self, done: int) -> None:
        """Set the number of units of the phase that are done."""
        self._done = done
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
        elif time.monotonic() - self._last_line_at > SECONDS_BETWEEN_LINES:
            self._print_line()

    def set_postfix(self, text: str) -> None:
        """Set the text behind the counts; it appears with the next update."""
        self._postfix = text
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)

    def log(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.write(escape_control_characters(text), file=self._stream)
        else:
            print_line(text, self._stream)

    def close(self) -> None:
        """End the current phase, if there is one."""
        if self._bar is not None:
            self._bar.close()
        elif self.name is not None and self._leave and time.monotonic() - self._started_at >= self._delay_seconds:
            self._print_line()
        self._bar, self.name = None, None

    def _print_line(self) -> None:
        self._last_line_at = time.monotonic()
        seconds = self._last_line_at - self._started_at
        of_total = "" if self._total is None else f" of {self._total:,}"
        rate = f", {tqdm.format_sizeof((self._done - self._initial) / seconds)} {self._unit}/s" if seconds > 0 else ""
        postfix = f", {self._postfix}" if self._postfix else ""
        self.log(f"{self.name}: {self._done:,}{of_total} {self._unit}{rate}{postfix}")
