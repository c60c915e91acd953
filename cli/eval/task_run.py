"""Run the tasks of a config: check everything, evaluate with a progress bar, write and print the results."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from cli.entry import exit_with_usage_error, usage_errors
from cli.eval.report import TaskReport, build_page, read_evaluations, summarize
from cli.eval.variants import resolve_variants
from cli.tables import print_parts
from config.dump import to_toml
from config.eval import EvalConfig
from diffusionlm.checkpoints.adapter_config import read_adapter_config
from diffusionlm.checkpoints.model_files import check_weight_files, read_model_description
from diffusionlm.evaluation.grading.code_execution import probe_isolation
from diffusionlm.evaluation.tasks.humaneval import HumanEvalTask
from diffusionlm.evaluation.tasks.preparation import TaskReader
from diffusionlm.evaluation.tasks.results import CONFIG_FILE, RESULTS_FILE
from files.atomic import write_text_atomic
from files.json_files import read_text
from files.output_paths import check_can_write
from files.terminal_text import print_message
from logger.pages.html import write_page
from logger.progress import ProgressMeter

if TYPE_CHECKING:
    from diffusionlm.evaluation.tasks.runner import PlannedVariant

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
        variants = prepare_variants(config)
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


def prepare_variants(config: EvalConfig) -> list[PlannedVariant]:
    """Resolve the variants, and check all tasks against their models, before a model is loaded.

    Raises:
        ValueError: something does not fit; names the variant, the task or the file.
    """
    resolved = resolve_variants(config)
    if any(isinstance(task, HumanEvalTask) and task.run_code for variant in resolved for task in variant.tasks):
        try:
            probe_isolation()
        except RuntimeError as error:
            raise ValueError(f"run_code = true: {error}") from None
    reader, planned = TaskReader(), []
    for variant in resolved:
        assert variant.model.path is not None, "resolve_variants has checked it"
        try:
            model = read_model_description(variant.model.path)
            tasks = tuple(reader.prepare(task, model, variant.model) for task in variant.tasks)
            check_weight_files(variant.model.path)
            if variant.model.adapter is not None:
                read_adapter_config(variant.model.adapter)
        except ValueError as error:
            if len(resolved) == 1:
                raise
            raise ValueError(f"variant {variant.name!r}: {error}") from None
        planned.append((variant, model.directory, tasks))
    from diffusionlm.evaluation.tasks.runner import PlannedVariant

    return [PlannedVariant(variant.name, variant.model, directory, tasks) for variant, directory, tasks in planned]


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
