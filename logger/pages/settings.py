"""Settings of one thing, or of several side by side: what differs in a table, what is common folded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from logger.pages.tables import join, table, terms


def render_settings(columns: Sequence[tuple[str, Mapping[str, Any]]], subject: str = "settings") -> Markup:
    """Render settings.

    Args:
        columns: name and settings (dotted key -> value) of each thing.
        subject: what the settings are called in "The ... are the same".
    """
    keys = dict.fromkeys(key for _, settings in columns for key in settings)
    written = {key: [format_setting(values[key]) if key in values else "" for _, values in columns] for key in keys}
    different = [(key, cells) for key, cells in written.items() if len(set(cells)) > 1]
    html = Markup("")
    if different:
        html += table([name for name, _ in columns], different, first="Differences", classes="different")
    elif len(columns) > 1:
        html += Markup("<p>The {} are the same.</p>").format(subject)
    common = [(key, cells[0]) for key, cells in written.items() if len(set(cells)) == 1]
    title = "All values" if len(columns) == 1 else f"{len(common)} value{'s' * (len(common) != 1)} in common"
    sections: dict[str, list[tuple[str, str]]] = {}
    for key, value in common:
        section, _, rest = key.partition(".")
        sections.setdefault(section if rest else "", []).append((rest or section, value))
    blocks = join(
        Markup('<section class="card"><h3>{}</h3>{}</section>').format(section, terms(values, "lines"))
        for section, values in sections.items()
    )
    return html + Markup('<details><summary>{}</summary><div class="config">{}</div></details>').format(title, blocks)


def format_setting(value: Any) -> str:
    """Format a value of a config: "" in quotes, true and false, lists as JSON."""
    if isinstance(value, str):
        return value or '""'
    if isinstance(value, list):
        return json.dumps(value, ensure_ascii=False, default=str)
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
