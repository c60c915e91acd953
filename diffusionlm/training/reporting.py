"""What a run tells while it goes and at its end."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

from config.dump import to_toml_values
from diffusionlm.checkpoints.model_card import ValidationBound
from diffusionlm.diffusion.noised_batch import NoisedBatch
from diffusionlm.evaluation.evaluate import EvaluationResult
from diffusionlm.training.card import add_final_bound_to_card
from diffusionlm.training.run import Run
from diffusionlm.training.signals import StopRequest
from diffusionlm.training.step_metrics import StepMetrics
from diffusionlm.training.summary import Summary
from files.atomic import write_text_atomic
from logger import (
    ConsoleLogger,
    JsonConsole,
    JsonLinesLogger,
    LoggerGroup,
    NoLogger,
    RunLogger,
    console_style,
    open_sinks,
)
from profiling import memory


def build_logger(run: Run) -> RunLogger:
    """The record on disk, a bar or lines for people, and the copies that are asked for; of the first rank alone."""
    if not run.world.is_first:
        return NoLogger()
    config, step = run.config.logging, run.progress.step
    told = LoggerGroup(
        JsonLinesLogger(run.directory.metrics, step),
        ConsoleLogger(run.max_steps, step, console_style(config.progress, sys.stderr), sys.stderr),
    )

    def tell(at: int, text: str) -> None:
        told.event(at, "logging", text)

    values = to_toml_values(run.config, "config")
    copies = open_sinks(config, run.directory.path, step, values, tell)
    if config.console == "json":
        copies.append(JsonConsole(sys.stdout, tell))
    return LoggerGroup(*copies, told)  # the record is closed last: what goes wrong with copies is in it


def log_data_sources(run: Run, logger: RunLogger) -> None:
    """Where the text comes from, for the record and for people."""
    for part in run.parts:
        reasons = "".join(f"; {count:,} {reason}" for reason, count in part.skipped.items())
        text = f"data: {part.name}, {part.source.provenance} ({part.source.identity}){reasons}"
        logger.event(run.progress.step, "data", text)


def collect_step_metrics(run: Run, numbers: StepMetrics, noised_batches: list[NoisedBatch]) -> dict[str, Any]:
    """What is logged of a step, the last one so far; times are means over the steps since this was last asked."""
    progress = run.progress
    per_step = progress.seconds / progress.step
    seconds = run.flops.mean_step_seconds(progress.step, progress.seconds)
    rates = run.optimizers.learning_rates()
    return {
        "loss": numbers.loss,
        "loss_smooth": progress.smooth_loss,
        **({"balance_loss": numbers.balance_loss} if run.model.config.router_aux_loss_coef else {}),
        "grad_l2_norm": numbers.grad_norm,
        "lr": max(rates.values()),
        **{f"lr/{name}": rate for name, rate in rates.items()},
        "tokens_seen": progress.tokens_seen,
        "tokens_per_second": progress.tokens_seen / progress.seconds,
        "step_seconds": seconds,
        **run.flops.metrics(noised_batches, seconds),
        "seconds_left": per_step * (run.max_steps - progress.step),
        "skipped_steps": progress.skipped,
        **{f"data/{name}": value for name, value in vars(run.loader.metrics()).items()},
    }


def collect_monitor_metrics(run: Run, numbers: StepMetrics) -> dict[str, float]:
    """What is logged beside `collect_step_metrics`, and not looked at in other steps. Memory is the peak so far, in bytes."""
    peak_memory = {f"memory/{name}": value for name, value in memory.peak_memory(run.device.type).items()}
    # As gradients are cut; not a number where their norm is none.
    ratio = min(1.0, run.config.training.max_grad_norm / (numbers.grad_norm + 1e-6)) if numbers.is_finite else math.nan
    return {"grad_clip_ratio": ratio, **run.monitor.metrics(), **peak_memory}


def run_validation(run: Run, logger: RunLogger) -> None:
    """Evaluate on the fixed grid and log it; all ranks do a part."""
    with run.evaluation_mode():
        result = run.validator.evaluate_quick(run.model)
    step = run.progress.step
    run.last_validation = ValidationBound(result.nats_per_token, result.standard_error, step, result.block_length == 1)
    logger.metrics(step, evaluation_metrics("val", result))
    logger.event(
        step,
        "validation",
        f"step {step}: validation {result.nats_per_token:.3f} +- {result.standard_error:.3f} nats per token"
        + "".join(f", top-1 accuracy {fill.top1_accuracy:.1%} at {fill.fraction:.0%} masked" for fill in result.fills),
    )


def evaluation_metrics(prefix: str, result: EvaluationResult) -> dict[str, float]:
    """An evaluation as it is logged."""
    return {
        f"{prefix}_nats_per_token": result.nats_per_token,
        f"{prefix}_standard_error": result.standard_error,
        f"{prefix}_bits_per_byte": result.bits_per_byte,
        f"{prefix}_bits_per_byte_standard_error": result.bits_per_byte_standard_error,
        **{f"{prefix}_top1_accuracy/{fill.fraction}": fill.top1_accuracy for fill in result.fills},
    }


def run_final_evaluation(run: Run, logger: RunLogger, stop: StopRequest) -> Summary:
    """The final evaluation, kept in summary.json by the first rank, and logged for those who look on elsewhere.

    Raises:
        StoppedError: a signal ended it before there was a result; it can be made again.
    """
    with stop.interruptible(), run.evaluation_mode():
        evaluations, ngrams = run.validator.final(run.model)
    loaded = run.loader.state_dict()
    summary = Summary(
        evaluation=evaluations[0],
        other_block_lengths=tuple(evaluations[1:]),
        source_entropy=run.validator.source_entropy,
        ngrams=ngrams,
        parameters=sum(parameter.numel() for parameter in run.model.parameters()),
        step=run.progress.step,
        tokens_seen=run.progress.tokens_seen,
        seconds=run.progress.seconds,
        padding_share=loaded["padding"] / max(1, loaded["places"]),
    )
    if run.world.is_first:
        write_text_atomic(run.directory.summary, json.dumps(summary.to_json(), indent=1) + "\n")
        add_final_bound_to_card(run, summary)
    logger.metrics(summary.step, evaluation_metrics("final", summary.evaluation))
    return summary
