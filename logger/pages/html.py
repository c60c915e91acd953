"""Render pages as self-contained HTML files: styles, scripts and values are inside, and nothing is fetched."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from files.atomic import write_text_atomic
from files.terminal_text import escape_control_characters
from logger.pages import (
    Cell,
    Chart,
    Code,
    Example,
    Examples,
    Link,
    Number,
    Output,
    Page,
    Part,
    Table,
    Token,
    cut_text,
    format_cell,
)
from logger.pages.charts import draw_chart, escape_text
from logger.pages.markdown import render_markdown

MAX_TEXT = 4_000
"""Characters of a text; the files of the run contain all of it."""

MAX_OPEN_ROWS = 30
"""Longer tables scroll in a frame of their own."""

MIN_SHADE_PERCENT = 20
"""Shade of tokens of the last forward; those of the first have 100 %."""

LINE_BREAK = Markup('<i aria-label="line break">↵</i>\n')

_MASKED_SPAN = re.compile(r"\[MASK:([^\[\]\n]*)\]")

FORWARD_NOTE = (
    "The small number is the forward, from 1 on, in which a token was unmasked; the earlier, the stronger its shade. "
    "Point at a token to read its probability."
)


def write_page(page: Page, path: Path) -> None:
    """Write the HTML file atomically and, beside it with the suffix ``.md``, its Markdown version.

    Raises:
        OSError: a file cannot be written.
    """
    write_text_atomic(path, render_html(page))
    write_text_atomic(path.with_suffix(".md"), render_markdown(page))


def render_html(page: Page) -> str:
    """Render a page. Texts are escaped, and their control characters shown as escapes."""
    values: list[dict[str, Any]] = []
    return render_template(
        "logger.pages/sections.html",
        title=escape_control_characters(page.title),
        sections={name: _render_parts(parts, values) for name, parts in page.sections.items()},
        data=values,
        notes=map(escape_control_characters, page.notes),
        states=map(escape_control_characters, page.states),
    )


def join(parts: Iterable[str]) -> Markup:
    """Join HTML and text, which is escaped."""
    return Markup("").join(parts)


def _render_parts(parts: Sequence[Part], values: list[dict[str, Any]]) -> Markup:
    """Render parts in order, with the charts that follow each other side by side."""
    html, figures = [], []
    for part in parts:
        if isinstance(part, Chart):
            figure, chart_values = draw_chart(part, len(values))
            figures.append(figure)
            values.append(chart_values)
            continue
        html += [_charts(figures), _render_part(part)]
        figures = []
    return join([*html, _charts(figures)])


def _charts(figures: Sequence[Markup]) -> Markup:
    return Markup('<div class="charts">{}</div>').format(join(figures)) if figures else Markup("")


def _render_part(part: Table | Examples | Code | str) -> Markup:
    if isinstance(part, str):
        return Markup("<p>{}</p>").format(escape_text(part))
    if isinstance(part, Code):
        html = Markup("<pre>{}</pre>").format(escape_text(part.text))
        return Markup('<section class="card code">{}{}</section>').format(_title(part.title), html)
    html = render_table(part) if isinstance(part, Table) else render_examples(part.examples)
    html += Markup('<p class="note">{}</p>').format(escape_text(part.note)) if part.note else Markup("")
    if part.is_folded:
        return Markup("<details><summary>{}</summary>{}</details>").format(escape_text(part.title), html)
    return _title(part.title) + html


def _title(text: str) -> Markup:
    return Markup("<h3>{}</h3>").format(escape_text(text)) if text else Markup("")


def render_table(table: Table) -> Markup:
    """Render a table that scrolls in its own frame if it is wide or long."""
    right = [Markup(' class="right"' * is_right) for is_right in table.is_right]
    head = join(
        Markup('<th scope="col"{}>{}</th>').format(
            is_right,
            Markup('<button type="button">{}</button>' if table.is_sortable else "{}").format(escape_text(name)),
        )
        for name, is_right in zip(table.heads, right, strict=False)
    )
    rows = join(
        Markup("<tr{}>{}</tr>").format(
            Markup(' class="{}"').format(table.styles[index]) if index in table.styles else "",
            join(
                _render_cell(table, cell, text, is_right, is_name=column == 0)
                for column, (cell, text, is_right) in enumerate(zip(row, table.texts(row), right, strict=True))
            ),
        )
        for index, row in enumerate(table.rows)
    )
    html = Markup("{}<tbody>{}</tbody>").format(Markup("<thead><tr>{}</tr></thead>").format(head) if head else "", rows)
    classes = "wide" + " long" * (len(table.rows) > MAX_OPEN_ROWS) + " facts" * (not head)
    return Markup('<div class="{}" tabindex="0" role="group"><table>{}</table></div>').format(classes, html)


def _render_cell(table: Table, cell: Cell, text: str, is_right: Markup, *, is_name: bool) -> Markup:
    """Render a value; with the value that its column is sorted by, if it is."""
    value = cell.value if isinstance(cell, Number) else "" if cell is None else cell
    key = Markup(' data-key="{}"').format(escape_text(str(value)) if not isinstance(value, tuple) else text)
    items = cell if isinstance(cell, tuple) else (cell,)
    html = Markup(" · ").join(
        Markup('<a href="{}">{}</a>').format(quote(item.path), escape_text(item.text))
        if isinstance(item, Link)
        else escape_text(format_cell(item) if isinstance(cell, tuple) else text) or "-"
        for item in items
    )
    element = Markup('<th scope="row"{}{}>{}</th>' if is_name else "<td{}{}>{}</td>")
    return element.format(is_right, key if table.is_sortable else "", html)


def render_examples(examples: Iterable[Example]) -> Markup:
    """Render a card for each prompt, with its outputs; those of known forwards can be replayed."""
    cards, has_forwards = [], False
    card = Markup('<article class="sample card">{}<pre class="given" dir="auto">{}</pre>{}{}</article>')
    for example in examples:
        num_forwards = max((_num_forwards(output) for output in example.outputs), default=0)
        has_forwards = has_forwards or num_forwards > 0
        outputs = join(map(_render_output, example.outputs))
        prompt = _render_masked_spans(cut_text(example.prompt, MAX_TEXT)) or "Without a prompt"
        cards.append(card.format(_title(example.title), prompt, _render_replay(num_forwards), outputs))
    note = Markup('<p class="note">{}</p>').format(FORWARD_NOTE) if has_forwards else Markup("")
    return Markup('<div class="samples">{}</div>{}').format(join(cards), note)


def _num_forwards(output: Output) -> int:
    return 0 if isinstance(output.text, str) else max((token.forward or 0 for token in output.text), default=0)


def _render_replay(num_forwards: int) -> Markup:
    """Render a slider over the forwards; the page's script shows and drives it."""
    html = (
        '<div class="replay" hidden><button type="button">Play</button>'
        f'<label>Forward <input type="range" min="0" max="{num_forwards}" value="{num_forwards}"></label>'
        f"<output>{num_forwards} of {num_forwards}</output></div>"
    )
    return Markup(html if num_forwards > 1 else "")


def _render_output(output: Output) -> Markup:
    facts = render_facts([(name, format_cell(value)) for name, value in output.facts])
    if isinstance(output.text, str):
        text = escape_text(cut_text(output.text, MAX_TEXT)) if output.text.strip() else Markup("(only whitespace)")
    else:
        num_forwards = _num_forwards(output)
        text = join(_render_token(token, num_forwards) for token in output.text)
    label = Markup("<h4>{}</h4>").format(escape_text(output.label)) if output.label else Markup("")
    return Markup('{}{}<pre dir="auto">{}</pre>').format(label, facts, text)


def _render_token(token: Token, num_forwards: int) -> Markup:
    """Render a token; what the model wrote is shaded by its forward."""
    if token.forward is None:
        return escape_text(token.text)
    text = LINE_BREAK.join(map(escape_text, token.text.split("\n")))
    if not token.forward:
        return Markup("<mark>{}</mark>").format(text)
    first, *lines = text.split(LINE_BREAK)
    shade = 100 - (100 - MIN_SHADE_PERCENT) * (token.forward - 1) / max(1, num_forwards - 1)
    note = "" if token.probability is None else f", probability {token.probability:.1%}"
    return Markup('<mark data-forward="{0}" style="--shade:{1:.0f}%" title="forward {0}{2}">{3}</mark>').format(
        token.forward, shade, note, LINE_BREAK.join([Markup("{}<sub>{}</sub>").format(first, token.forward), *lines])
    )


def _render_masked_spans(prompt: str) -> Markup:
    """Render masked spans as boxes that show their number of tokens."""
    # Escaping changes neither brackets nor colons.
    return Markup(_MASKED_SPAN.sub(r'<span class="hole">\1</span>', str(escape_text(prompt))))


def render_facts(facts: Iterable[tuple[str, str]]) -> Markup:
    """Render each name above its value."""
    pairs = join(
        Markup("<div><dt>{}</dt><dd>{}</dd></div>").format(*map(escape_text, fact)) for fact in facts if fact[1]
    )
    return Markup('<dl class="facts">{}</dl>').format(pairs) if pairs else pairs


def render_template(template: str, **values: Any) -> str:
    """Render a template.

    Args:
        template: package and file, as in ``cli.infer/replay.html``.
        values: the template's variables; `logger/pages/page.html` needs ``title`` and ``data``, which becomes JSON.

    Raises:
        ValueError: ``data`` has a number that is not finite.
    """
    return _environment.get_template(template).render(values)


def _read(name: str) -> str:
    package, _, file = name.partition("/")
    return resources.files(package).joinpath(file).read_text(encoding="utf-8")


_environment = Environment(
    loader=FunctionLoader(_read), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
_environment.globals["source"] = lambda name: Markup(_read(name).rstrip("\n"))
_environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
