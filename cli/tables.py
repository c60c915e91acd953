"""Text and tables of a command's result."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from logger.pages import Column, Table
from logger.pages.terminal import print_parts
from logger.pages.terminal import render_text as render

__all__ = ["make_table", "print_parts", "render"]


def make_table(rows: Sequence[Sequence[str]], *, right: Collection[int] = (), has_header: bool = False) -> Table:
    """Build a table of texts.

    Args:
        rows: equally long rows.
        right: indices of the columns that are aligned to the right; all others are aligned to the left.
        has_header: the first row is a header.
    """
    heads = rows[0] if has_header else [""] * (len(rows[0]) if rows and right else 0)
    columns = [Column(head, align="right" if index in right else "left") for index, head in enumerate(heads)]
    return Table(columns, rows[1:] if has_header else rows)
