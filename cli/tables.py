"""Tables of aligned columns for a terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def align_columns(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """Format rows of cells as lines with aligned columns, two spaces apart.

    Args:
        rows: equally long rows; the first may be a header.
        right: indices of the columns that are aligned to the right; all others are aligned to the left.
    """
    widths = column_widths(rows)
    lines = []
    for row in rows:
        cells = (
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return lines


def column_widths(rows: Sequence[Sequence[str]]) -> list[int]:
    """The width of the longest cell of each column."""
    return [max(map(len, column)) for column in zip(*rows, strict=True)]
