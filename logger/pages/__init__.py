"""What reports are made of: tables, charts and examples on a page, with numbers and texts as they are.

`logger.pages.terminal`, `logger.pages.markdown` and `logger.pages.html` render them; escaping is theirs. N points.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from config.dump import format_value

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Floats: TypeAlias = "NDArray[np.float64]"  # a text: most commands need no numpy

SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k"))
"""Numbers from these sizes on are written with a suffix."""
MAX_SETTING = 2_000
"""Characters of a value of a config."""


@dataclass(frozen=True)
class Number:
    """A number that brings its own format, or has a standard error."""

    value: float
    format: str = ""
    """Format specification, such as ``.1%``; "": that of the column, else four significant digits."""
    error: float | None = None


@dataclass(frozen=True)
class Link:
    """A link to a file beside the page; its text alone where there are no links."""

    text: str
    path: str


Cell = str | int | float | Number | Link | None | tuple[str | Link, ...]
"""A value of a table. None: there is none; a tuple: several, separated by dots."""


@dataclass(frozen=True)
class Column:
    """Heading and format of a column of numbers."""

    name: str
    format: str = ""
    """Format specification of its numbers; "": four significant digits."""


@dataclass(frozen=True)
class Table:
    """Rows of values. The first column names the rows."""

    columns: Sequence[Column | str]
    """A text is a column that is aligned to the left; without columns there is no header."""
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    note: str = ""
    best_row: int | None = None
    """Index of the row to emphasize."""
    is_folded: bool = False
    """On an HTML page only the title is open at first."""

    @property
    def is_right(self) -> list[bool]:
        """Whether each column is aligned to the right."""
        if not self.columns:
            return [False] * max(map(len, self.rows), default=0)
        return [isinstance(column, Column) for column in self.columns]

    @property
    def heads(self) -> list[str]:
        """The headings; empty if there are none."""
        names = [column.name if isinstance(column, Column) else column for column in self.columns]
        return names if any(names) else []

    def texts(self, row: Sequence[Cell]) -> list[str]:
        """Format the values of a row."""
        formats = [column.format if isinstance(column, Column) else "" for column in self.columns] or [""] * len(row)
        return [format_cell(cell, style) for cell, style in zip(row, formats, strict=True)]


@dataclass(frozen=True)
class Curve:
    """A curve of N points."""

    name: str
    x_N: Floats
    y_N: Floats
    color: int = 0
    smooth_N: Floats | None = None
    error_N: Floats | None = None
    """Standard error, a bar at each point."""
    has_dots: bool = False


@dataclass
class Chart:
    """Curves over one axis."""

    title: str
    unit: str
    lines: list[Curve]
    note: str = ""
    x_name: str = "step"
    x_end: float = 0.0
    """End of the horizontal axis, unless a point is beyond it."""
    is_log: bool = False
    """Whether the vertical scale is logarithmic, if all values are positive."""
    from_zero: bool = False
    y_least: float = -math.inf
    """Smallest possible value, below which no margin or error bar extends the linear axis."""


@dataclass(frozen=True)
class Token:
    """Part of a text: a token, or several that form one character."""

    text: str
    forward: int | None = None
    """The forward, from 1, after which it was final; None: the token was given."""
    probability: float | None = None


@dataclass(frozen=True)
class Output:
    """A text that a model wrote."""

    label: str
    text: str | tuple[Token, ...]
    facts: Sequence[tuple[str, str]] = ()
    """Names and values, shown above the text."""

    @property
    def num_forwards(self) -> int:
        """The last forward that unmasked a token; 0: there is none."""
        return max((token.forward or 0 for token in self.text if isinstance(token, Token)), default=0)


@dataclass(frozen=True)
class Example:
    """A prompt, whose masked spans are written ``[MASK:n]``, and its outputs."""

    prompt: str
    outputs: Sequence[Output]
    title: str = ""
    pictures: Sequence[str] = ()
    """Images of the prompt, as data URLs; HTML pages show them."""

    @property
    def num_forwards(self) -> int:
        """The last forward of all outputs."""
        return max((output.num_forwards for output in self.outputs), default=0)


@dataclass(frozen=True)
class Examples:
    """Several examples side by side."""

    examples: Sequence[Example]
    title: str = ""
    is_folded: bool = False


@dataclass(frozen=True)
class Code:
    """Text as it is: a command, or the end of a log."""

    text: str
    title: str = ""


Part = Table | Chart | Examples | Code | str
"""A part of a page; a text is a paragraph."""


@dataclass
class Page:
    """A report: parts by heading. Headings without parts are left out."""

    title: str
    sections: dict[str, list[Part]]
    notes: Sequence[str] = ()
    """Warnings that precede the numbers."""
    states: Sequence[str] = ()
    """Short facts below the title."""

    def __post_init__(self) -> None:
        self.sections = {name: parts for name, parts in self.sections.items() if parts}


def format_cell(cell: Cell, style: str = "") -> str:
    """Format a value with this format specification, unless it brings its own."""
    if cell is None:
        return ""
    if isinstance(cell, tuple):
        return " · ".join(map(format_cell, cell))
    if isinstance(cell, str | Link):
        return cell if isinstance(cell, str) else cell.text
    if not isinstance(cell, Number):
        cell = Number(cell)
    style = cell.format or style
    text = _format(cell.value, style, 4)
    if cell.error is None or not math.isfinite(cell.error) or not math.isfinite(cell.value):
        return text
    return f"{text} ± {_format(cell.error, style.lstrip('+'), 2)}"


def _format(value: float, style: str, digits: int) -> str:
    if not style or not math.isfinite(value):
        return format_number(value, digits)
    return format(value, style)


def format_number(value: float, digits: int = 4) -> str:
    """Format a number with four significant digits: 0.00125, 3.142, 12.3k, 1.2e-06."""
    if not math.isfinite(value):
        return "not finite"
    for size, suffix in SUFFIXES:
        if abs(value) >= size:
            unit = 1e3 if suffix == "k" else size
            return f"{_format_plain(value / unit, digits - 1)}{suffix}"
    return _format_plain(value, digits)


def _format_plain(value: float, digits: int) -> str:
    text = f"{value:.{digits}g}"
    return text if "e+" not in text else f"{value:.0f}"


def cut_text(text: str, length: int) -> str:
    """Return at most so many characters, and say how many there are more."""
    rest = len(text) - length
    return text[:length] + (f" ... ({rest:,} more characters)" if rest > 0 else "")


def describe_chart(chart: Chart) -> str:
    """Describe a chart in words, where it cannot be seen."""
    parts = []
    for line in chart.lines:
        values = [value for value in line.y_N.tolist() if math.isfinite(value)]
        if len(values) > 1:
            first, last, least, greatest = map(format_number, (values[0], values[-1], min(values), max(values)))
            parts.append(f"{line.name}: from {first} to {last}, least {least}, greatest {greatest}")
        elif values:
            parts.append(f"{line.name}: {format_number(values[0])}")
    title = ", ".join(filter(None, [chart.title, chart.unit]))
    return f"{title}, by {chart.x_name}. {'; '.join(parts)}"


def tabulate_settings(columns: Sequence[tuple[str, Mapping[str, Any]]], subject: str = "settings") -> list[Part]:
    """Tabulate settings.

    Args:
        columns: name and settings (dotted key -> value) of each thing.
        subject: what the settings are called in "The ... are the same".
    """
    keys = dict.fromkeys(key for _, settings in columns for key in settings)
    rows = [[key, *(format_value(own[key], MAX_SETTING) if key in own else None for _, own in columns)] for key in keys]
    different = [row for row in rows if len(set(row[1:])) > 1]
    common = [row[:2] for row in rows if len(set(row[1:])) == 1]
    parts: list[Part] = []
    if different:
        parts.append(Table(["Differences", *(name for name, _ in columns)], different))
    elif len(columns) > 1:
        parts.append(f"The {subject} are the same.")
    if common:
        title = "All values" if len(columns) == 1 else "Values in common"
        parts.append(Table((), common, title=title, is_folded=True))
    return parts
