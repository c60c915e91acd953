"""Pages of reports: tables, charts and samples, rendered to a terminal, to Markdown and to HTML. No torch."""

from logger.pages.parts import (
    Cell,
    Chart,
    Code,
    Column,
    Curve,
    Link,
    Number,
    Output,
    Page,
    Part,
    Sample,
    Samples,
    Table,
    Token,
)

__all__ = [
    "Cell",
    "Chart",
    "Code",
    "Column",
    "Curve",
    "Link",
    "Number",
    "Output",
    "Page",
    "Part",
    "Sample",
    "Samples",
    "Table",
    "Token",
]
