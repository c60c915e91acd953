"""The report of runs: results, curves, samples, config and events on one page. No torch."""

from logger.report.page import build_page, write_report
from logger.report.reading import LoggedRun, read_run, read_runs

__all__ = ["LoggedRun", "build_page", "read_run", "read_runs", "write_report"]
