"""The gallery of a sweep: one page with the table, the curves and the texts of its runs; it asks for no other file.

What it looks like stands in `gallery.html`; it can be read without a script, which only sorts the table.
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
"""Share of a curve whose height does not count for the scale: losses fall from far above."""
_TEXT_LENGTH = 4_000
"""Letters of a text that are shown; the files have all of it."""


def render_page(table: SweepTable, title: str, directory: Path) -> str:
    """The page's HTML.

    Args:
        table: the runs, in the order in which they are shown.
        title: of the page.
        directory: of the sweep, in which files that a run left are looked for; links go from there.
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
    """Which column the rows are sorted by to begin with."""
    by_bytes = any("bits per byte" in note for note in table.notes)
    column = table.columns["bits_per_byte" if by_bytes else "bound"] if table.command == "train" else None
    return ' aria-sort="ascending"' if heading == column else ""


def _render_table_row(table: SweepTable, row: SweepTableRow) -> str:
    texts = format_cells(table, row)
    numbers: list[Measurement | None] = [None] * len(table.keys)
    numbers += [row.result.numbers.get(name) for name in table.columns]
    numbers += [Measurement(row.seconds) if row.seconds else None, None]
    shown = []
    for column, (text, number) in enumerate(zip(texts, numbers, strict=True)):
        key = _sort_key(text) if column < len(table.keys) else ("" if number is None else repr(number.value))
        if column == len(texts) - 1:
            key = text
            text = f'<a href="#{_anchor(row)}">{escape(row.status)}</a>' + ' <b class="tag">best</b>' * row.is_best
        else:
            text = escape(text).replace("+-", "&plusmn;")
        shown.append(f'<td data-key="{escape(key)}">{text}</td>')
    best = ' class="best"' * row.is_best
    return f"<tr{best}>{''.join(shown)}</tr>"


def _sort_key(text: str) -> str:
    """A number that a script can read, where the value is one."""
    try:
        return repr(float(text.replace("_", "")))
    except ValueError:
        return text


def _anchor(row: SweepTableRow) -> str:
    return f"run-{quote(row.name)}"


def _render_texts(table: SweepTable) -> str:
    """For each text that was given, what each run made of it, side by side."""
    longest = max((len(row.result.texts) for row in table.rows), default=0)
    sections = []
    for index in range(longest):
        having = [row for row in table.rows if index < len(row.result.texts)]
        given = list(dict.fromkeys(row.result.texts[index][0] for row in having))
        head = _truncate(given[0]) if len(given) == 1 else ""
        figures = "".join(_render_text(table, row, index, with_given=len(given) > 1) for row in having)
        shown = f'<pre class="given">{escape(head)}</pre>' if head else '<p class="given">Sampled from nothing</p>'
        sections.append(
            f'<section class="card" aria-label="text {index + 1}">{shown if len(given) == 1 else ""}'
            f'<div class="side">{figures}</div></section>'
        )
    if not sections:
        return ""
    heading = "Samples" if table.command == "train" else "Outputs"
    return f"<h2>{heading}, side by side</h2>{''.join(sections)}"


def _render_text(table: SweepTable, row: SweepTableRow, index: int, with_given: bool) -> str:
    given, made = row.result.texts[index]
    before = f'<pre class="given">{escape(_truncate(given))}</pre>' if with_given and given else ""
    best = ' <b class="tag">best</b>' * row.is_best
    shown = (
        f'<pre lang="">{escape(_truncate(made))}</pre>' if made.strip() else '<p class="given">white space alone</p>'
    )
    return (
        f'<figure><figcaption><a href="#{_anchor(row)}">{escape(_format_run_values(table, row))}</a>{best}</figcaption>'
        f"{before}{shown}</figure>"
    )


def _format_run_values(table: SweepTable, row: SweepTableRow) -> str:
    short = short_keys(table.keys)
    return ", ".join(f"{short[key]} {row.values[key]}" for key in table.keys)


def _truncate(text: str) -> str:
    return text if len(text) <= _TEXT_LENGTH else f"{text[:_TEXT_LENGTH]} ..."


def _render_run(table: SweepTable, row: SweepTableRow, directory: Path) -> str:
    """A card: what it was, where its files are, its curve, and how it failed."""
    error = f'<pre class="error">{escape(chr(10).join(row.error))}</pre>' if row.error else ""
    status = f"{row.status}, best" if row.is_best else row.status
    kind = " best" * row.is_best
    return (
        f'<article class="card{kind}" id="{_anchor(row)}"><h3>{escape(_format_run_values(table, row))}</h3>'
        f'<p class="status">{escape(status)}{_render_links(row, directory)}</p>{_render_curve(table, row)}{error}</article>'
    )


def _render_links(row: SweepTableRow, directory: Path) -> str:
    """Files that are there, as seen from the page."""
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
    """The loss of a run before that of the first of the table, all cards in one scale. Inline SVG."""
    if len(row.result.curve) < 2:
        return ""
    curves = [each.result.curve for each in table.rows if len(each.result.curve) > 1]
    settled = [loss for curve in curves for _, loss in curve[int(len(curve) * _UNSCALED_FRACTION) :]]
    low, high = min(settled), max(settled)
    last = max(step for curve in curves for step, _ in curve)

    def line(curve: Sequence[tuple[int, float]], name: str) -> str:
        scale = (_HEIGHT - 4.0) / (high - low or 1.0)
        points = " ".join(
            f"{step / last * _WIDTH:.1f},{2.0 + (high - min(loss, high)) * scale:.1f}" for step, loss in curve
        )
        return f'<polyline class="{name}" points="{points}" vector-effect="non-scaling-stroke"/>'

    first = table.rows[0]
    behind = line(first.result.curve, "first") if row is not first and len(first.result.curve) > 1 else ""
    step, loss = row.result.curve[-1]
    return (
        f'<figure class="curve"><svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" preserveAspectRatio="none" role="img" '
        f'aria-label="Training loss">{behind}{line(row.result.curve, "own")}</svg>'
        f"<figcaption>training loss {loss:.3f} at step {step:,}; {low:.2f} to {high:.2f}"
        f"{', grey: the first of the table' if behind else ''}</figcaption></figure>"
    )
