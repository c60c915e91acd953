"""`report.html`: what a run was and what came of it, on one page. No torch."""

from logger.report.page import write_report
from logger.report.reading import LoggedRun, read_run, read_runs

__all__ = ["LoggedRun", "read_run", "read_runs", "write_report"]
