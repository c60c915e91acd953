"""The signals that ask a command to save its work and end."""

from __future__ import annotations

import signal

STOP_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)
"""A terminal or an SSH connection that is gone, Ctrl-C, Slurm's warning, a batch system."""


def list_stop_signals() -> list[signal.Signals]:
    """List the signals that this process handles: without SIGHUP if it is ignored, as ``nohup`` asks for."""
    is_hangup_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in STOP_SIGNALS if number != signal.SIGHUP or not is_hangup_ignored]
