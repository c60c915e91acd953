"""Reports of a run: metrics, events, validation results, the summary of its final evaluation, and ``report.html``."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from config.dump import to_toml_values
from diffusionlm.checkpoints.model_card import ValidationBound
from diffusionlm.data.loader import LoadedStep
from diffusionlm.data.pipeline import count_skipped, list_skipped
from diffusionlm.data.reader import SkipLog
from diffusionlm.diffusion.noised_batch import NoisedBatch
from diffusionlm.evaluation.tasks.results import format_item_line, to_file_name
from diffusionlm.evaluation.validation import EvaluationResult
from diffusionlm.training.metrics import StepMetrics, compute_batch_flops
from diffusionlm.training.run import Run
from diffusionlm.training.run_checkpoint import add_final_bound_to_card
from diffusionlm.training.signals import StopRequest
from files.atomic import write_text_atomic
from files.json_files import read_json_object
from logger import (
    ConsoleLogger,
    JsonConsole,
    JsonLinesLogger,
    LoggerGroup,
    RunLogger,
    console_style,
    open_sinks,
)
from logger.report import write_report
from logger.report.reading import rename_metrics
from profiling import memory
from profiling.adapter_size import measure_adapter
from profiling.flops import peak_flops

_ROOT = Path(__file__).parents[2]
MAX_LEFT_OUT_SHARE = 0.1
"""A source that leaves out a larger share of its records is worth a warning."""


@dataclass(frozen=True)
class RunSummary:
    """The contents of summary.json."""

    evaluation: EvaluationResult
    other_block_lengths: tuple[EvaluationResult, ...]
    """The same sequences under the other block lengths that the model was trained with."""
    source_entropy: float | None
    """Exact entropy of a document in nats, if the source knows it and each sequence is one document."""
    ngrams: dict[str, float]
    """Name -> nats per token of an n-gram model of the training tokens on the validation sequences."""
    parameters: int
    step: int
    tokens_seen: int
    seconds: float
    padding_share: float
    """Fraction of the positions of training sequences that were padding."""
    skipped_records: Sequence[str] = ()
    """A line for each reason why training records were left out or repaired."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, path: Path) -> RunSummary:
        """Read a summary.json, which may have former names of metrics.

        Raises:
            ValueError: the file is damaged.
        """
        try:
            return TypeAdapter(cls).validate_python(rename_metrics(read_json_object(path)))
        except ValueError as error:
            raise ValueError(
                f"{path} cannot be read ({error}): remove it, and the same command makes the final evaluation again"
            ) from error


def build_logger(run: Run) -> RunLogger:
    """The logger of the first rank: metrics.jsonl, the console, and the copies of ``[logging]``. Others log nothing."""
    if not run.world.is_first:
        return LoggerGroup()
    config, step = run.config.logging, run.progress.step
    record = LoggerGroup(
        JsonLinesLogger(run.directory.metrics, step),
        ConsoleLogger(run.settings.max_steps, step, console_style(config.progress, sys.stderr), sys.stderr),
    )

    def log_failure(at_step: int, text: str) -> None:
        record.event(at_step, "logging", text)

    values = to_toml_values(run.config)
    copies = open_sinks(config, run.directory.path, step, values, log_failure)
    if config.console == "json":
        copies.append(JsonConsole(sys.stdout, log_failure))
    return LoggerGroup(*copies, record)  # the record is closed last, so that it has the failures of copies


def log_data_sources(run: Run, logger: RunLogger) -> None:
    for component in run.components:
        skipped = "".join(f"; {count:,} {reason}" for reason, count in count_skipped([component]).items())
        text = f"data: {component.name}, {component.source.provenance} ({component.source.identity}){skipped}"
        logger.event(run.progress.step, "data", text)
    if len(run.validator.rows) == 1 < run.config.validation.final_rows:
        text = (
            "warning: validation has one row, so its bound has no standard error: raise validation_fraction, or name "
            "validation_paths or a validation_split with more text"
        )
        logger.event(run.progress.step, "data", text)
    for line in run.validator.skipped_records:
        logger.event(run.progress.step, "data", f"validation data: {line}")


def read_skip_logs(run: Run) -> list[tuple[str, list[SkipLog]]]:
    """Names and skip logs of the training sources; the loader may have them in another process."""
    states = (run.loader_state or {}).get("skip_logs", ())  # absent if a checkpoint of an older version was complete
    return [
        (component.name, [SkipLog(**state) for state in saved])
        for component, saved in zip(run.components, states, strict=False)
    ]


def log_skipped_records(run: Run, logger: RunLogger) -> None:
    """Log a line for each reason why training records were left out or repaired."""
    for name, logs in read_skip_logs(run):
        for line in list_skipped(name, logs):
            logger.event(run.progress.step, "data", f"data: {line}")


def describe_left_out_records(run: Run) -> str | None:
    """Describe the records of the first source that leaves out more than `MAX_LEFT_OUT_SHARE` of its records so far.
    None: no source does."""
    for name, logs in read_skip_logs(run):
        share = 1.0 - math.prod(1.0 - log.num_left_out / max(1, log.total) for log in logs)
        if share > MAX_LEFT_OUT_SHARE:
            return f"{share:.0%} of the records are left out so far: {'; '.join(list_skipped(name, logs))}"
    return None


def collect_launch_metrics(run: Run, metrics: StepMetrics, loaded: LoadedStep) -> None:
    """Add to the last step what is logged of it and known when it is launched. The device may compute it later."""
    learning_rates = run.state.optimizers.learning_rates()
    metrics.at_launch = {
        "lr": max(learning_rates.values()),
        **{f"lr/{group}": learning_rate for group, learning_rate in learning_rates.items()},
        "tokens_seen": run.progress.tokens_seen,
        **collect_data_metrics(run, loaded),
    }
    metrics.peak_seconds = count_peak_seconds(run, loaded.noised_batches)
    metrics.read_monitor = run.monitor.read_results


def collect_data_metrics(run: Run, loaded: LoadedStep) -> dict[str, Any]:
    """Metrics of the loader after the last step. ``data/skipped``: records left out so far; ``data/skipped/REASON``:
    the same by reason, with records that were changed."""
    logs = [log for _, logs in read_skip_logs(run) for log in logs]
    counts = Counter[str]()
    for log in logs:
        counts.update(log.counts)
    return {
        "data/epoch": loaded.state["epoch"],
        "data/padding_share": compute_padding_share(loaded.state),
        "data/skipped": sum(log.num_left_out for log in logs),
        "data/tokens_per_second": loaded.tokens_per_second,
        "data/wait_seconds": loaded.wait_seconds,
        "data/buffered_steps": loaded.buffered_steps,
        **loaded.metrics,
        **{f"data/skipped/{reason}": count for reason, count in sorted(counts.items())},
    }


def compute_padding_share(loader_state: Mapping[str, Any]) -> float:
    """Share of the positions so far that hold padding."""
    return float(loader_state["padding"] / max(1, loader_state["num_positions"]))


def count_peak_seconds(run: Run, noised_batches: Sequence[NoisedBatch]) -> float | None:
    """Seconds that a step on these batches would take at the device's peak: the MFU is this, divided by the step's
    duration. None: the peak is unknown. The device is not read."""
    device, model, lora = run.settings.device, run.state.model.config, run.config.lora
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if peak is None:
        return None
    factors = None if lora is None else measure_adapter(lora, model).factors_in_flops
    measuring = 0 if run.state.model_loss is None else run.state.model_loss.num_measuring_forwards
    trains_tower = lora is None and "vision" not in run.config.training.freeze
    flops = (
        compute_batch_flops(model, batch, factors, num_measuring_forwards=measuring, trains_tower=trains_tower)
        for batch in noised_batches
    )
    return sum(flops) / (run.world.mesh.num_data_copies * peak)


def collect_step_metrics(run: Run, metrics: StepMetrics, step_seconds: float) -> dict[str, Any]:
    """Logged metrics of a step, the last one that was read; ``step_seconds`` is the mean duration of a step."""
    progress, step = run.progress, metrics.step
    has_routers = run.state.model.config.router_aux_loss_coef > 0
    return {
        "loss": metrics.loss,
        "loss_smooth": progress.smooth_loss(step),
        **({"balance_loss": metrics.load_balancing_loss} if has_routers else {}),
        "grad_l2_norm": metrics.grad_norm,
        **metrics.at_launch,
        "tokens_per_second": metrics.at_launch["tokens_seen"] / progress.seconds,
        "step_seconds": step_seconds,
        **({} if metrics.peak_seconds is None else {"mfu": metrics.peak_seconds / step_seconds}),
        "seconds_left": progress.seconds / step * (run.settings.max_steps - step),
        "skipped_steps": progress.skipped,
    }


def collect_monitor_metrics(run: Run, metrics: StepMetrics) -> dict[str, float]:
    """Metrics that are collected in logged steps only. ``memory/...`` is the peak so far, in bytes."""
    peak_memory = {f"memory/{name}": value for name, value in memory.peak_memory(run.settings.device.type).items()}
    ratio = min(1.0, run.settings.max_grad_norm / (metrics.grad_norm + 1e-6)) if metrics.is_finite else math.nan
    return {"grad_clip_ratio": ratio, **(metrics.read_monitor() if metrics.read_monitor else {}), **peak_memory}


def run_validation(run: Run, logger: RunLogger) -> None:
    """Evaluate on the first validation sequences and log the result. All ranks share the forwards."""
    with run.evaluation_mode():
        result = run.validator.evaluate_quick(run.state.model)
    step = run.progress.step
    run.last_validation = to_validation_bound(result, step)
    if run.early_stopping.config is not None:
        run.early_stopping.add(run.world.run_on_first(lambda: result.nats_per_token), step)  # the same on all ranks
    logger.metrics(step, evaluation_metrics("val", result))
    logger.event(
        step,
        "validation",
        f"step {step}: validation {run.last_validation.format_value('+-')}"
        + "".join(f", top-1 accuracy {fill.top1_accuracy:.1%} at {fill.fraction:.0%} masked" for fill in result.fills),
    )


def log_early_stop(run: Run, logger: RunLogger) -> None:
    """Log why the run ended before its last step, and which checkpoint is the best one, if that is so."""
    if run.early_stopping.is_due:
        best = run.directory.store.best_path()
        text = f"stopped early after step {run.progress.step}: {run.early_stopping.describe()}"
        logger.event(run.progress.step, "early_stopping", text + (f"; the best checkpoint is {best}" if best else ""))


def run_tasks(run: Run, logger: RunLogger) -> None:
    """Evaluate on the tasks of ``[evaluation]``, log the results, and write every answer to a file of the run."""
    step = run.progress.step
    with run.evaluation_mode():
        outcomes = run.tasks.evaluate(run.state.model)
    scores = {f"{result.task}/{rule}": value.value for result, _ in outcomes for rule, value in result.metrics.items()}
    run.last_tasks = step, scores
    logger.metrics(step, {key: value for result, _ in outcomes for key, value in result.list_logged_values().items()})
    for result, items in outcomes:
        logger.event(step, "tasks", f"step {step}: {result.describe()}")
        if run.world.is_first:
            path = run.directory.path / "evaluation" / f"step-{step:08d}-{to_file_name(result.task)}.jsonl"
            path.parent.mkdir(exist_ok=True)
            write_text_atomic(path, "".join(format_item_line(item) + "\n" for item in items))


def run_final_evaluation(run: Run, logger: RunLogger, stop: StopRequest) -> RunSummary:
    """Evaluate on all validation sequences, write summary.json and the model card, and log the result.

    Raises:
        StoppedError: a signal ended it before there was a result. The same command repeats it.
    """
    with stop.interruptible(), run.evaluation_mode():
        evaluations, ngrams = run.validator.final(run.state.model)
    summary = RunSummary(
        evaluation=evaluations[0],
        other_block_lengths=tuple(evaluations[1:]),
        source_entropy=run.validator.source_entropy,
        ngrams=ngrams,
        parameters=sum(shape.numel() for shape in run.state.parallel.whole_shapes.values()),
        step=run.progress.step,
        tokens_seen=run.progress.tokens_seen,
        seconds=run.progress.seconds,
        padding_share=compute_padding_share(run.loader_state or {}),
        skipped_records=[line for name, logs in read_skip_logs(run) for line in list_skipped(name, logs)],
    )
    if run.world.is_first:
        write_text_atomic(run.directory.summary, json.dumps(summary.to_json(), indent=1) + "\n")
        add_final_bound_to_card(run, to_validation_bound(summary.evaluation, summary.step))
    logger.metrics(summary.step, evaluation_metrics("final", summary.evaluation))
    return summary


def to_validation_bound(result: EvaluationResult, step: int) -> ValidationBound:
    """The part of an evaluation that state.json and the model card store."""
    return ValidationBound(result.nats_per_token, result.standard_error, step, result.block_length == 1)


def evaluation_metrics(prefix: str, result: EvaluationResult) -> dict[str, float]:
    return {
        f"{prefix}_nats_per_token": result.nats_per_token,
        f"{prefix}_standard_error": result.standard_error,
        f"{prefix}_bits_per_byte": result.bits_per_byte,
        f"{prefix}_bits_per_byte_standard_error": result.bits_per_byte_standard_error,
        **{
            f"{prefix}_{name}": value
            for name in ("eos_padding_nats_per_token", "next_token_nats_per_token")
            if (value := getattr(result, name)) is not None
        },
        **{f"{prefix}_draft_acceptance/{i}": rate for i, (rate, _) in enumerate(result.draft_acceptance, start=1)},
        **{f"{prefix}_top1_accuracy/{fill.fraction}": fill.top1_accuracy for fill in result.fills},
    }


@contextlib.contextmanager
def record_run_events(run: Run, logger: RunLogger) -> Iterator[None]:
    """Log the environment at the start. At the end append how the run ended to metrics.jsonl and write report.html.

    The logger may be closed inside. A failure to write is never raised, so it does not hide why the run ended.
    """
    logger.event(run.progress.step, "environment", f"environment: {describe_environment(run)}")
    try:
        yield
    except BaseException as error:
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        _append_event(run, "failed", f"failed after step {run.progress.step}: {reason}")
        raise
    else:
        if not run.is_complete:
            _append_event(run, "stopped", f"stopped after step {run.progress.step} and saved")
        elif not run.directory.summary.is_file():
            text = "stopped after the last step, which is saved, and before the final evaluation"
            _append_event(run, "stopped", text)
    finally:
        _write_report_page(run)


def describe_environment(run: Run) -> str:
    """``name value; name value; ...``: start time in UTC, software, device, ranks, and the commit if there is one."""
    device = run.settings.device
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    started = datetime.datetime.now(datetime.UTC)
    values = {
        "started": f"{started:%Y-%m-%d %H:%M} UTC",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": f"{device.type}, {device_name}",
        "threads": str(torch.get_num_threads()),
        "ranks": str(run.world.size),
        "precision": str(run.settings.precision).removeprefix("torch."),
        "system": f"{platform.system()} {platform.release()}",
    }
    commit = describe_commit(_ROOT)
    if commit is not None:
        values["commit"] = commit
    return "; ".join(f"{name} {value}" for name, value in values.items())


def describe_commit(root: Path) -> str | None:
    """Commit of the checkout at ``root``, with ``-dirty`` if files were changed; None if there is no checkout."""
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=5, env=environment, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None


def _append_event(run: Run, kind: str, text: str) -> None:
    """Append an event to metrics.jsonl only: the command shows it to people by itself."""
    if not run.world.is_first:
        return
    with contextlib.suppress(OSError, ValueError):
        record = JsonLinesLogger(run.directory.metrics, run.progress.step)
        record.event(run.progress.step, kind, text)
        record.close()


def _write_report_page(run: Run) -> None:
    if not run.world.is_first:
        return
    page = run.directory.path / "report.html"
    try:
        write_report([run.directory.path], page)
    except Exception as error:
        text = f"report.html could not be written: {type(error).__name__}: {error}"
        run.log(text)
        _append_event(run, "report", text)
    else:
        run.log(f"report: {page}")
