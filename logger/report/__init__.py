"""The report of runs, ``report.html``: results, curves, samples, config and events on one page. No torch."""

from logger.report.page import write_report
from logger.report.reading import LoggedRun, read_run, read_runs

__all__ = ["LoggedRun", "read_run", "read_runs", "write_report"]
