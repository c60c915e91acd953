"""Pages of reports: tables, charts and examples, rendered to a terminal, to Markdown and to HTML. No torch."""

from logger.pages.parts import (
    Cell,
    Chart,
    Code,
    Column,
    Curve,
    Example,
    Examples,
    Link,
    Number,
    Output,
    Page,
    Part,
    Table,
    Token,
)

__all__ = [
    "Cell",
    "Chart",
    "Code",
    "Column",
    "Curve",
    "Example",
    "Examples",
    "Link",
    "Number",
    "Output",
    "Page",
    "Part",
    "Table",
    "Token",
]
