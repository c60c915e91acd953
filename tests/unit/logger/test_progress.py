"""The progress meter in a terminal and elsewhere."""

from __future__ import annotations

import io
import time

import pytest

from logger.progress import ProgressMeter


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run_phase(meter: ProgressMeter, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 units in 40 seconds, starting at second 1."""
    now = 1.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    meter.begin("learning", "merges", 200)
    for done in range(1, 201):
        now += 0.2
        meter.set_postfix(f"{done} learnt")
        meter.set(done)
    meter.close()
    meter.close()


def test_a_bar_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    run_phase(ProgressMeter(stream), monkeypatch)
    assert "learning" in stream.getvalue() and "200/200" in stream.getvalue() and "200 learnt" in stream.getvalue()


def test_lines_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, terminal = io.StringIO(), Terminal()
    run_phase(ProgressMeter(stream), monkeypatch)
    run_phase(ProgressMeter(terminal, style="lines"), monkeypatch)
    expected = [f"learning: {done} of 200 merges, 5.00 merges/s, {done} learnt" for done in (76, 152, 200)]
    assert terminal.getvalue().splitlines() == stream.getvalue().splitlines() == expected


def test_a_transient_phase_prints_no_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    run_phase(ProgressMeter(stream, leave=False), monkeypatch)
    assert len(stream.getvalue().splitlines()) == 2
