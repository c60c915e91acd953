"""Tables and text in a terminal and elsewhere."""

from __future__ import annotations

import io

import pytest

from logger.pages import Column, Table
from logger.pages.terminal import render_text

TABLE = Table(
    ["name", Column("count")],
    [["[red]a[/red] \x1b[2J :smile:", "1"], ["日本", "1,234"], ["  b " + "c" * 200, ""]],
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_a_terminal_folds_cells_and_leaves_lines_to_copy() -> None:
    command = "next: " + "word " * 20 + "end"
    lines = render_text([TABLE, command], Terminal()).split("\n")
    assert lines[0].startswith("\x1b[1mname") and lines[-1] == command
    assert all(len(line) <= 40 for line in lines[1:-1])
    assert sum(line.count("c") for line in lines[1:-1]) == 200, "nothing is cut"
