"""The HTML page of a sweep: the table, the loss curves and the texts of its runs, without external resources.

The template is `gallery.html`; its script only sorts the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

from cli.sweep.commands import REPLAY_FILE
from cli.sweep.grid import short_keys
from cli.sweep.results import Measurement
from cli.sweep.table import SweepTable, SweepTableRow, format_cells
from logger.report.template import fill_template

_WIDTH, _HEIGHT = 240.0, 64.0
_UNSCALED_FRACTION = 0.1
"""First part of a curve that the vertical scale ignores, because initial losses are much higher."""
_TEXT_LENGTH = 4_000
"""Maximum length of a text on the page; the files contain all of it."""


def render_page(table: SweepTable, title: str, directory: Path) -> str:
    """Render the page.

    Args:
        table: the runs in display order.
        title: title of the page.
        directory: directory of the sweep; existing files of runs are linked relative to it.
    """
    done = sum(row.status == "done" for row in table.rows)
    parts = {
        "title": escape(title),
        "lead": escape(f"{_pluralize(len(table.rows), f'{_COMMAND_NOUNS[table.command]} run')}, {done} done"),
        "notes": "".join(f"<p>{escape(note)}</p>" for note in table.notes),
        "table": _render_table(table),
        "texts": _render_texts(table),
        "runs": "".join(_render_run(table, row, directory) for row in table.rows),
    }
    return fill_template("cli.sweep", "gallery.html", parts)


_COMMAND_NOUNS = {"train": "training", "infer": "inference"}


def _pluralize(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)


def _render_table(table: SweepTable) -> str:
    heads = "".join(
        f'<th scope="col"{_sort_attribute(table, heading)}><button type="button">{escape(heading)}</button></th>'
        for heading in table.headings
    )
    body = "".join(_render_table_row(table, row) for row in table.rows)
    return f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody>"


def _sort_attribute(table: SweepTable, heading: str) -> str:
    """Mark the heading of the column that the rows are sorted by."""
    by_bytes = any("bits per byte" in note for note in table.notes)
    column = table.columns["bits_per_byte" if by_bytes else "bound"] if table.command == "train" else None
    return ' aria-sort="ascending"' if heading == column else ""


def _render_table_row(table: SweepTable, row: SweepTableRow) -> str:
    texts = format_cells(table, row)
    numbers: list[Measurement | None] = [None] * len(table.keys)
    numbers += [row.result.numbers.get(name) for name in table.columns]
    numbers += [Measurement(row.seconds) if row.seconds else None, None]
    cells = []
    for column, (text, number) in enumerate(zip(texts, numbers, strict=True)):
        key = _sort_key(text) if column < len(table.keys) else ("" if number is None else repr(number.value))
        if column == len(texts) - 1:
            key = text
            text = f'<a href="#{_anchor(row)}">{escape(row.status)}</a>' + ' <b class="tag">best</b>' * row.is_best
        else:
            text = escape(text).replace("+-", "&plusmn;")
        cells.append(f'<td data-key="{escape(key)}">{text}</td>')
    best = ' class="best"' * row.is_best
    return f"<tr{best}>{''.join(cells)}</tr>"


def _sort_key(text: str) -> str:
    """Format a numeric value for the script; other text is returned as it is."""
    try:
        return repr(float(text.replace("_", "")))
    except ValueError:
        return text


def _anchor(row: SweepTableRow) -> str:
    return f"run-{quote(row.name)}"


def _render_texts(table: SweepTable) -> str:
    """Render the outputs of all runs side by side, for each prompt."""
    longest = max((len(row.result.texts) for row in table.rows), default=0)
    sections = []
    for index in range(longest):
        rows = [row for row in table.rows if index < len(row.result.texts)]
        prompts = list(dict.fromkeys(row.result.texts[index][0] for row in rows))
        is_shared = len(prompts) == 1
        prompt = _truncate(prompts[0]) if is_shared else ""
        figures = "".join(_render_text(table, row, index, with_prompt=not is_shared) for row in rows)
        head = f'<pre class="given">{escape(prompt)}</pre>' if prompt else '<p class="given">Without a prompt</p>'
        sections.append(
            f'<section class="card" aria-label="text {index + 1}">{head if is_shared else ""}'
            f'<div class="side">{figures}</div></section>'
        )
    if not sections:
        return ""
    heading = "Samples" if table.command == "train" else "Outputs"
    return f"<h2>{heading}, side by side</h2>{''.join(sections)}"


def _render_text(table: SweepTable, row: SweepTableRow, index: int, with_prompt: bool) -> str:
    prompt, output = row.result.texts[index]
    head = f'<pre class="given">{escape(_truncate(prompt))}</pre>' if with_prompt and prompt else ""
    best = ' <b class="tag">best</b>' * row.is_best
    body = (
        f'<pre lang="">{escape(_truncate(output))}</pre>' if output.strip() else '<p class="given">only whitespace</p>'
    )
    return (
        f'<figure><figcaption><a href="#{_anchor(row)}">{escape(_format_run_values(table, row))}</a>{best}</figcaption>'
        f"{head}{body}</figure>"
    )


def _format_run_values(table: SweepTable, row: SweepTableRow) -> str:
    short = short_keys(table.keys)
    return ", ".join(f"{short[key]} {row.values[key]}" for key in table.keys)


def _truncate(text: str) -> str:
    return text if len(text) <= _TEXT_LENGTH else f"{text[:_TEXT_LENGTH]} ..."


def _render_run(table: SweepTable, row: SweepTableRow, directory: Path) -> str:
    """Render the card of a run: values, status, links, loss curve and error."""
    error = f'<pre class="error">{escape(chr(10).join(row.error))}</pre>' if row.error else ""
    status = f"{row.status}, best" if row.is_best else row.status
    kind = " best" * row.is_best
    return (
        f'<article class="card{kind}" id="{_anchor(row)}"><h3>{escape(_format_run_values(table, row))}</h3>'
        f'<p class="status">{escape(status)}{_render_links(row, directory)}</p>'
        f"{_render_curve(table, row)}{error}</article>"
    )


def _render_links(row: SweepTableRow, directory: Path) -> str:
    """Render links to the existing files of a run."""
    candidates = {
        "report": Path("runs") / row.name / "report.html",
        "replay": Path("runs") / row.name / REPLAY_FILE,
        "config": Path("configs") / f"{row.name}.toml",
        "log": Path("logs") / f"{row.name}.log",
    }
    links = [
        f'<a href="{quote(path.as_posix())}">{name}</a>'
        for name, path in candidates.items()
        if (directory / path).is_file()
    ]
    return "".join(f" &middot; {link}" for link in links)


def _render_curve(table: SweepTable, row: SweepTableRow) -> str:
    """Draw the loss curve of a run and of the first run of the table as inline SVG; all cards have one scale."""
    if len(row.result.curve) < 2:
        return ""
    curves = [table_row.result.curve for table_row in table.rows if len(table_row.result.curve) > 1]
    losses = [loss for curve in curves for _, loss in curve[int(len(curve) * _UNSCALED_FRACTION) :]]
    low, high = min(losses), max(losses)
    last = max(step for curve in curves for step, _ in curve)

    def line(curve: Sequence[tuple[int, float]], name: str) -> str:
        scale = (_HEIGHT - 4.0) / (high - low or 1.0)
        points = " ".join(
            f"{step / last * _WIDTH:.1f},{2.0 + (high - min(loss, high)) * scale:.1f}" for step, loss in curve
        )
        return f'<polyline class="{name}" points="{points}" vector-effect="non-scaling-stroke"/>'

    first = table.rows[0]
    reference = line(first.result.curve, "first") if row is not first and len(first.result.curve) > 1 else ""
    step, loss = row.result.curve[-1]
    return (
        f'<figure class="curve"><svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" preserveAspectRatio="none" role="img" '
        f'aria-label="Training loss">{reference}{line(row.result.curve, "own")}</svg>'
        f"<figcaption>training loss {loss:.3f} at step {step:,}; {low:.2f} to {high:.2f}"
        f"{', gray: the first run of the table' if reference else ''}</figcaption></figure>"
    )
