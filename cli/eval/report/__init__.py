"""The report of evaluations of tasks: results, comparisons, curves and answers."""

from cli.eval.report.page import build_page, summarize
from cli.eval.report.reading import TaskReport, is_evaluation, read_evaluations

__all__ = ["TaskReport", "build_page", "is_evaluation", "read_evaluations", "summarize"]
