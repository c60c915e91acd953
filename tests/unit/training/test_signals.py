"""Signals: remembered, agreed upon by ranks, and obeyed at once the second time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from diffusionlm.training.signals import StoppedError, StopRequest
from files.stop_signals import STOP_SIGNALS


@pytest.fixture(autouse=True)
def default_hangup() -> Iterator[None]:
    """SIGHUP as outside of nohup."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, previous)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_the_first_is_remembered_and_the_second_ends(number: int) -> None:
    before = [signal.getsignal(signal_number) for signal_number in STOP_SIGNALS]
    with StopRequest() as stop:
        assert (stop.signal, stop.received_signal) == (None, None)
        os.kill(os.getpid(), number)
        assert (stop.signal, stop.received_signal) == (number, number)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(signal_number) for signal_number in STOP_SIGNALS] == before


def test_under_nohup_a_hangup_is_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.received_signal is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == signal.SIGTERM and len(stop.flags()) == len(STOP_SIGNALS), "the same on all ranks"
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_a_signal_that_is_passed_on_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """``timeout`` signals ``uv run`` and the run, and ``uv run`` passes the signal on to the run."""
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    stop = StopRequest()
    stop._handle_signal(signal.SIGTERM, None)
    clock[0] += 0.9
    stop._handle_signal(signal.SIGTERM, None)
    clock[0] += 0.2
    with pytest.raises(KeyboardInterrupt):
        stop._handle_signal(signal.SIGTERM, None)


def test_signal_to_one_rank_stops_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    first, other = StopRequest(is_distributed=True), StopRequest(is_distributed=True)
    other._handle_signal(signal.SIGUSR1, None)
    assert other.signal is None  # not before all know
    counts = [one + two for one, two in zip(first.flags(), other.flags(), strict=True)]
    for stop in (first, other):
        stop.stop_for_any_rank(counts)
    assert first.signal == other.signal == signal.SIGUSR1
    # What reaches this rank after the others have told it is its first; what comes at once behind it is its echo.
    first._handle_signal(signal.SIGUSR1, None)
    clock[0] += 0.9
    first._handle_signal(signal.SIGUSR1, None)
    clock[0] += 0.2
    with pytest.raises(KeyboardInterrupt):
        first._handle_signal(signal.SIGTERM, None)


def test_restartable_work_ends_at_the_first_signal() -> None:
    with StopRequest() as stop, pytest.raises(StoppedError), stop.interruptible():
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.signal == signal.SIGTERM
    with pytest.raises(StoppedError), stop.interruptible():
        raise AssertionError("it came before")
    shared = StopRequest(is_distributed=True)
    with shared.interruptible():
        shared._handle_signal(signal.SIGTERM, None)
    assert shared.received_signal == signal.SIGTERM, "no rank leaves the others alone"
