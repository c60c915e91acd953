"""Errors of users: a command that was called wrongly, and where a wrong value is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class UsageError(ValueError):
    """An argument, a config or an input is wrong, and the work has not begun. Commands exit with 2 instead of 1."""


@contextmanager
def prefix_errors(place: str) -> Iterator[None]:
    """Prefix the message of a ValueError with the place of the problem, such as a key and its value; "": with none."""
    try:
        yield
    except ValueError as error:
        if not place:
            raise
        raise ValueError(f"{place}: {error}") from error
