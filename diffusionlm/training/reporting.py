"""What a run tells while it goes and at its end."""

from __future__ import annotations

import json
import sys
from typing import Any

from diffusionlm.checkpoints.manifest import replace_text
from diffusionlm.diffusion.batch import Draw
from diffusionlm.training.numbers import StepNumbers
from diffusionlm.training.run import Run
from diffusionlm.training.summary import Summary
from logger import ConsoleLogger, JsonLinesLogger, LoggerGroup, NoLogger, RunLogger, console_style
from profiling import memory


def build_logger(run: Run) -> RunLogger:
    """The record on disk, and a bar or lines for people; of the first rank alone."""
    if not run.ranks.is_first:
        return NoLogger()
    style = console_style(run.config.logging.progress, sys.stderr)
    return LoggerGroup(
        JsonLinesLogger(run.directory.metrics, run.progress.step),
        ConsoleLogger(run.max_steps, run.progress.step, style, sys.stderr),
    )


def tell_of_data(run: Run, logger: RunLogger) -> None:
    """Where the text comes from, for the record and for people."""
    for part in run.parts:
        reasons = "".join(f"; {count:,} {reason}" for reason, count in part.skipped.items())
        text = f"data: {part.name}, {part.source.provenance} ({part.source.identity}){reasons}"
        logger.event(run.progress.step, "data", text)


def step_metrics(run: Run, numbers: StepNumbers, draws: list[Draw]) -> dict[str, Any]:
    """What is logged of a step, the last one so far; times are means over the steps since this was last asked."""
    progress = run.progress
    per_step = progress.seconds / progress.step
    seconds = run.flops.seconds_of_step(progress.step, progress.seconds)
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
        **run.flops.metrics(draws, seconds),
        "seconds_left": per_step * (run.max_steps - progress.step),
        "skipped_steps": progress.skipped,
        **{f"data/{name}": value for name, value in vars(run.loader.metrics()).items()},
        **(
            {f"memory/{name}": value for name, value in memory.peaks("cuda").items()} if not run.waits_each_step else {}
        ),
    }


def validate(run: Run, logger: RunLogger) -> None:
    """Evaluate on the fixed grid and log it; all ranks do a part."""
    with run.judged():
        result = run.validator.quick(run.model, run.average)
    step = run.progress.step
    run.validated = (step, result.nats_per_token)
    values = {
        "val_nats_per_token": result.nats_per_token,
        "val_standard_error": result.standard_error,
        "val_bits_per_byte": result.bits_per_byte,
        **{f"val_first_guess/{fill.fraction}": fill.first_guess for fill in result.fills},
    }
    logger.metrics(step, values)
    logger.event(
        step,
        "validation",
        f"step {step}: validation {result.nats_per_token:.3f} +- {result.standard_error:.3f} nats per token"
        + "".join(f", {fill.first_guess:.1%} right at {fill.fraction:.0%} masked" for fill in result.fills),
    )


def summarise(run: Run) -> Summary:
    """The final evaluation, kept in summary.json by the first rank."""
    with run.judged():
        evaluations, ngrams = run.validator.final(run.model, run.average)
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
    if run.ranks.is_first:
        replace_text(run.directory.summary, json.dumps(summary.to_json(), indent=1) + "\n")
    return summary
