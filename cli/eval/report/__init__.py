"""The report of evaluations of tasks, as HTML and as Markdown: results, comparisons, curves and answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cli.eval.report.contents import build_contents
from cli.eval.report.markdown import render_markdown
from cli.eval.report.page import render_page
from cli.eval.report.reading import TaskReport, is_evaluation, read_evaluations
from files.atomic import write_text_atomic

__all__ = ["is_evaluation", "write_evaluation_report"]


def write_evaluation_report(folders: Sequence[Path], output: Path) -> TaskReport:
    """Read finished evaluations, and write their page and, beside it with the suffix ``.md``, its Markdown version.

    Args:
        folders: of the evaluations.
        output: the page.

    Raises:
        ValueError: a folder holds no results of an evaluation, or a file of its answers is damaged.
        OSError: a file cannot be written.
    """
    report = read_evaluations(folders)
    tasks = [build_contents(task) for task in report.tasks]
    write_text_atomic(output, render_page(report, tasks))
    write_text_atomic(output.with_suffix(".md"), render_markdown(report, tasks))
    return report
