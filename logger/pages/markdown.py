"""Render pages as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from files.terminal_text import escape_control_characters
from logger.pages import Chart, Code, Examples, Output, Page, Part, Table, cut_text, describe_chart, format_cell

MAX_TEXT = 600
"""Characters of an output; the files of the run contain all of it."""


def render_markdown(page: Page) -> str:
    """Render a page. Texts are escaped, so that they are neither Markdown nor HTML."""
    blocks = [f"# {escape(page.title)}"]
    if page.states:
        blocks.append(escape("; ".join(page.states)))
    blocks += [f"> {escape(note)}" for note in page.notes]
    for title, parts in page.sections.items():
        blocks += [f"## {escape(title)}", *(block for part in parts for block in _render_part(part))]
    return "\n\n".join(blocks) + "\n"


def _render_part(part: Part) -> Iterator[str]:
    if isinstance(part, str | Chart):
        yield escape(part if isinstance(part, str) else describe_chart(part))
        return
    if part.title:
        yield f"### {escape(part.title)}"
    if isinstance(part, Table):
        yield render_table(part)
        if part.note:
            yield escape(part.note)
    elif isinstance(part, Code):
        yield fence(part.text)
    else:
        yield from _render_examples(part)


def render_table(table: Table) -> str:
    """Render a table without its title and note."""
    rules = ["---:" if is_right else "---" for is_right in table.is_right]
    lines = [_row(table.heads or [""] * len(rules)), f"| {' | '.join(rules)} |"]
    for index, row in enumerate(table.rows):
        lines.append(_row(table.texts(row), mark="**" if index == table.best_row else ""))
    return "\n".join(lines)


def _row(texts: Sequence[str], mark: str = "") -> str:
    return f"| {' | '.join(f'{mark}{escape(text)}{mark}' if text else '' for text in texts)} |"


def _render_examples(examples: Examples) -> Iterator[str]:
    for example in examples.examples:
        yield f"**{escape(example.title)}**" if example.title else "**Prompt**"
        yield fence(cut_text(example.prompt or "Without a prompt", MAX_TEXT))
        for output in example.outputs:
            facts = "; ".join(f"{name}: {format_cell(value)}" for name, value in output.facts)
            yield escape(": ".join(filter(None, [output.label, facts])))
            yield fence(cut_text(plain_text(output), MAX_TEXT))


def plain_text(output: Output) -> str:
    """Return the text of an output without its marks; that it is blank is said in words."""
    text = output.text if isinstance(output.text, str) else "".join(token.text for token in output.text)
    return text if text.strip() else "(only whitespace)"


def escape(text: str) -> str:
    """Escape what Markdown or HTML would interpret, within one line."""
    line = " ".join(escape_control_characters(text).split())
    return line if set(line) == {"-"} else re.sub(r"([\\`*_\[\]<>|#~$])", r"\\\1", line)


def fence(text: str) -> str:
    """Put a text into a block of code, whose fence is longer than any run of backticks in it."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    marks = "`" * max(3, longest + 1)
    return f"{marks}text\n{escape_control_characters(text)}\n{marks}"
