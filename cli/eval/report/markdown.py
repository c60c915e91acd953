"""The Markdown version of the report."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from cli.eval.report.comparing import ExampleGroup
from cli.eval.report.contents import TaskContents, cut_text, describe_answer
from cli.eval.report.reading import TaskReport
from cli.eval.report.tables import ReportTable
from files.terminal_text import escape_control_characters
from logger.pages.settings import format_setting

MAX_TEXT = 600
"""Characters of an answer; the files contain all of it."""


def render_markdown(report: TaskReport, tasks: Sequence[TaskContents]) -> str:
    """Render the report.

    Args:
        report: the evaluations.
        tasks: contents of each task.
    """
    parts = [f"# {_escape(report.title)}"]
    parts += [f"> {_escape(note)}" for note in report.notes]
    for contents in tasks:
        parts += [f"## {_escape(contents.task.name)}", *_render_task(contents)]
    commands = [origin.command for origin in report.origins if origin.command]
    if commands:
        parts += ["## Commands", *map(_fence, commands)]
    return "\n\n".join(parts) + "\n"


def _render_task(contents: TaskContents) -> Iterator[str]:
    yield from _render_table(contents.results)
    yield from _render_table(contents.answers)
    for title, content in (("Comparisons", contents.pairs), ("Speed and quality", contents.points)):
        if content is not None:
            yield f"### {title}"
            yield from _render_table(content)
    if contents.examples:
        yield "### Answers"
        for group in contents.examples:
            yield from _render_group(group)
    yield "### Protocol"
    settings = [values for _, values in contents.settings]
    keys = dict.fromkeys(key for own in settings for key in own)
    rows = [(key, [format_setting(own[key]) if key in own else "" for own in settings]) for key in keys]
    yield from _render_table(ReportTable("setting", tuple(label for label, _ in contents.settings), tuple(rows)))


def _render_table(content: ReportTable) -> Iterator[str]:
    lines = [[content.first, *content.heads], ["---"] * (1 + len(content.heads))]
    lines += [[name, *cells] for name, cells in content.rows]
    yield "\n".join(f"| {' | '.join(map(_escape, line))} |" for line in lines)
    if content.note:
        yield _escape(content.note)


def _render_group(group: ExampleGroup) -> Iterator[str]:
    yield f"**{_escape(group.title)}**: {group.total:,} items, {len(group.items)} of them here."
    for item in group.items:
        for label, answer in item.answers:
            facts = "; ".join(f"{name}: {value}" for name, value in describe_answer(answer))
            parts = [item.id, f"right answer {cut_text(item.gold, MAX_TEXT)}", f"{label}: {facts}"]
            yield _escape("; ".join(parts))
            if answer.output:
                yield _fence(cut_text(answer.output, MAX_TEXT))


def _escape(text: str) -> str:
    """Escape what Markdown or HTML would interpret, within one line."""
    line = " ".join(escape_control_characters(text).split())
    return line if set(line) == {"-"} else re.sub(r"([\\`*_\[\]<>|#~$])", r"\\\1", line)


def _fence(text: str) -> str:
    """Put a text into a block of code, whose fence is longer than any run of backticks in it."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    marks = "`" * max(3, longest + 1)
    return f"{marks}text\n{escape_control_characters(text)}\n{marks}"
