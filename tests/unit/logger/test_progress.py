"""The progress meter in a terminal and elsewhere."""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Iterator
from contextlib import closing
from typing import TextIO

import pytest

from logger import ConsoleLogger
from logger.console import ProgressMeter, console_style

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 1.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


class PseudoTerminal:
    """A terminal of 80 columns whose output can be read."""

    def __init__(self) -> None:
        self._master, slave = os.openpty()
        self.stream: TextIO = os.fdopen(slave, "w", encoding="utf-8")

    def read(self) -> str:
        """What was written since the last call, without the color of text."""
        self.stream.write("\0")  # the end of what is to be read
        self.stream.flush()
        data = b""
        while not data.endswith(b"\0"):
            data += os.read(self._master, 65536)
        return re.sub("\x1b\\[[0-9;]*m", "", data[:-1].decode("utf-8"))

    def close(self) -> None:
        self.stream.close()
        os.close(self._master)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[PseudoTerminal]:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with closing(PseudoTerminal()) as terminal:
        yield terminal


def run_phase(meter: ProgressMeter, clock: Clock) -> None:
    """200 units in 40 seconds."""
    meter.begin("training", "merges", 200)
    for done in range(10, 201, 10):
        clock.now += 2.0
        meter.set_postfix(f"{done} learnt")
        meter.set(done)
    meter.close()
    meter.close()


LINES = [f"training: {done} of 200 merges, 5.00 merges/s, {done} learnt" for done in (80, 160, 200)]


def test_a_bar_in_a_terminal(terminal: PseudoTerminal, clock: Clock) -> None:
    meter = ProgressMeter(terminal.stream)
    meter.begin("training", "steps", 200, initial=100)
    output = terminal.read()
    assert HIDE + SHOW in output and output.count(HIDE) == 1, "a killed process leaves a visible cursor"
    for done in (110, 120):
        clock.now += 2.0
        meter.set_postfix("loss \x1b[2J")
        meter.set(done)
    bar = terminal.read().rpartition("\r\x1b[2K")[2]
    assert re.fullmatch(r"training [━╸╺]+ 0:00:16 120 of 200 steps, 5\.00 steps/s, loss \\x1b\[2J", bar)
    meter.set(121)
    assert terminal.read() == "", "drawn at most ten times in a second"
    meter.log("[red]event[/red] \x1b[2J " + "word " * 20)
    event, bar = terminal.read().removeprefix("\r\x1b[2K").split("\r\n")
    assert event == r"[red]event[/red] \x1b[2J " + "word " * 20 and "120 of 200" in bar
    meter.close()
    assert "121 of 200 steps" in terminal.read()


def test_phases_that_end_soon_show_nothing(terminal: PseudoTerminal, clock: Clock) -> None:
    meter = ProgressMeter(terminal.stream, is_transient=True)
    meter.begin("reading", "rows", 10)
    meter.set(10)
    meter.begin("scoring", "forwards")
    assert terminal.read() == ""
    clock.now += 4.0
    meter.set(8)
    assert "scoring 8 forwards, 2.00 forwards/s" in terminal.read()
    meter.close()
    assert terminal.read().rpartition(SHOW)[2].endswith("\x1b[2K"), "the bar is erased"


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb"), ("FORCE_COLOR", "1")])
def test_lines_elsewhere_or_if_wanted(
    name: str, value: str, terminal: PseudoTerminal, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    is_wanted = name == "FORCE_COLOR"
    assert console_style("auto", terminal.stream) == ("bar" if is_wanted else "lines")
    stream = io.StringIO()
    run_phase(ProgressMeter(stream), clock)
    run_phase(ProgressMeter(terminal.stream, style="lines" if is_wanted else "auto"), clock)
    assert terminal.read().split("\r\n")[:-1] == stream.getvalue().splitlines() == LINES
    transient = io.StringIO()
    run_phase(ProgressMeter(transient, is_transient=True), clock)
    assert transient.getvalue().splitlines() == LINES[:2], "no last line"


@pytest.mark.parametrize("style", ["bar", "lines"])
def test_a_training_run(style: str, terminal: PseudoTerminal, clock: Clock) -> None:
    values = {"loss": 2.5, "tokens_per_second": 12345.6, "seconds_left": 61.0}
    console = ConsoleLogger(20, 10, "bar" if style == "bar" else "lines", terminal.stream)
    clock.now += 1.0
    console.progress(11, values)
    console.metrics(11, values)
    console.event(11, "sample", "text \x1b]0;x\x07")
    console.close()
    output = terminal.read()
    assert "text \\x1b]0;x\\x07\r\n" in output and "\x07" not in output
    if style == "bar":
        assert "11 of 20 steps, 1.00 steps/s, loss 2.500, 12,346 tokens/s" in output
    else:
        assert output.split("\r\n")[0] == "step 11/20  loss 2.5000  12,346 tokens/s  1:01 left"


def test_a_policy_gradient_shows_rewards(terminal: PseudoTerminal) -> None:
    console = ConsoleLogger(20, 10, "lines", terminal.stream)
    console.metrics(11, {"loss": 0.0, "rl/reward": 0.25, "tokens_per_second": 10.0, "seconds_left": 1.0})
    assert "step 11/20  reward 0.2500  10 tokens/s" in terminal.read()
