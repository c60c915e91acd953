"""The error of a command that was called wrongly."""

from __future__ import annotations


class UsageError(ValueError):
    """An argument, a config or an input is wrong, and the work has not begun. Commands exit with 2 instead of 1."""
