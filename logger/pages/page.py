"""Pages of sections that are HTML already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from logger.pages.html import render_template


def fill_page(
    titles: tuple[str, str],
    sections: Mapping[str, str],
    charts: list[dict[str, Any]],
    notes: list[str],
    states: list[str],
    headline: list[tuple[str, str, str]] | None = None,
) -> str:
    """Render a page of sections with charts, tables and samples.

    Args:
        titles: of the window and of the page.
        sections: HTML by heading; empty ones are left out.
        charts: values of all charts, for the script (`logger.pages.charts.draw_charts`).
        notes: warnings that precede the sections.
        states: list items below the heading.
        headline: main numbers: name, value and a line below; None: there are none.

    Raises:
        ValueError: a value of a chart is not finite, which JSON cannot express.
    """
    return render_template(
        "logger.pages/sections.html",
        title=titles[0],
        heading=titles[1],
        sections={name: Markup(html) for name, html in sections.items() if html},
        data=charts,
        notes=notes,
        states=states,
        headline=headline,
    )
