"""Run the tasks of a config: check everything, evaluate with a progress bar, write and print the results."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from cli.entry import exit_with_usage_error, usage_errors
from cli.eval.report import TaskReport, build_page, read_evaluations, summarize
from cli.eval.variants import resolve_variants
from cli.tables import print_parts
from config.dump import to_toml
from config.eval import EvalConfig
from diffusionlm.evaluation.tasks.preparation import prepare_variants
from diffusionlm.evaluation.tasks.results import CONFIG_FILE, RESULTS_FILE
from files.atomic import write_text_atomic
from files.json_files import read_text
from files.output_paths import check_can_write
from files.terminal_text import print_message
from logger.pages.html import write_page
from logger.progress import ProgressMeter

PROGRESS_DELAY_SECONDS = 3.0
REPORT_FILE = "report.html"


def run_tasks(name: str, config: EvalConfig, argv: Sequence[str] | None) -> None:
    """Evaluate the tasks, and print the results.

    Args:
        name: of the command.
        argv: its arguments. None: those of the process.
    """
    directory = config.results_directory
    if directory is None:
        exit_with_usage_error(name, "no folder for the results: add --output DIR, or directory to [output]")
    # Imported here, so that --help and config errors do not wait for torch.
    with usage_errors(name):
        existing = directory if directory.exists() else directory.parent
        check_can_write(existing, f"output.directory (--output) = {directory}")
        variants = prepare_variants(resolve_variants(config))
        from diffusionlm.evaluation.tasks.runner import TaskRun

        run = TaskRun.open(directory, variants)
        write_text_atomic(directory / CONFIG_FILE, to_toml(config))
    command = shlex.join([name, *(sys.argv[1:] if argv is None else argv)])
    with closing(ProgressMeter(sys.stderr, delay_seconds=PROGRESS_DELAY_SECONDS, leave=False)) as meter:

        def show_progress(phase: str, unit: str, done: int, total: int | None) -> None:
            if phase != meter.name:
                meter.begin(phase, unit, total)
            meter.set(done)

        run.run(show_progress, command)
    page = directory / REPORT_FILE
    report = read_evaluations([directory])
    write_page(build_page(report), page)
    _print_results(config, directory, report)
    print_message(f"report: {page}")


def _print_results(config: EvalConfig, directory: Path, report: TaskReport) -> None:
    values = json.loads(read_text(directory / RESULTS_FILE))
    del values["item_ids"]  # as long as the data; the folder has them
    text = json.dumps(values, ensure_ascii=False)
    if config.output.file is not None:
        write_text_atomic(config.output.file, text + "\n")
    if config.output.format == "json":
        print(text)
    else:
        print_parts(summarize(report))
