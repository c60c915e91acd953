"""``diffusionlm-eval``: tasks, and the likelihood of a text under a model."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cli.arguments import parse_command
from cli.entry import exit_with_usage_error, friendly_errors, usage_errors
from cli.eval.arguments import add_eval_arguments
from config.eval import EvalConfig
from files.atomic import write_text_atomic
from files.paths import check_can_write
from logger.pages import Part, Table
from logger.pages.terminal import print_parts

if TYPE_CHECKING:
    from diffusionlm.evaluation.text_likelihood import LikelihoodResult, OpenedText

NAME = "diffusionlm-eval"

EXAMPLE = f"""  {NAME} --model runs/quickstart --task gsm8k --data test.jsonl --limit 100 --output runs/gsm8k
  {NAME} --model runs/a --model runs/b --task multiple_choice --data arc.jsonl --output runs/arc
  {NAME} --model runs/chat --task gsm8k --data test.jsonl --output runs/sweep \\
      --vary generation.remasking_strategy=entropy,topk_margin --vary generation.block_length=8,32
  {NAME} --model runs/quickstart --data README.md
  {NAME} --model runs/blocks --data "texts/*.jsonl" --set likelihood.block_length=16 --json
  {NAME} --model runs/quickstart --data README.md --set likelihood.kind=sampler \\
      --set likelihood.generation.remasking_strategy=entropy"""

UNITS_OF_PHASES = {"scoring": "forwards", "decoding": "tokens"}


@friendly_errors(NAME, "lower batch_size of the task or of [likelihood]")
def main(argv: Sequence[str] | None = None) -> None:
    config, _ = parse_command(
        EvalConfig,
        name=NAME,
        description="Accuracy on tasks, or nats per token, perplexity and bits per byte of a text, with their errors.",
        example=EXAMPLE,
        config_required=False,
        add_arguments=add_eval_arguments,
        argv=argv,
    )
    if config.tasks:
        # Imported here, so that --help and config errors do not wait for numpy and regex.
        from cli.eval.task_run import run_tasks

        run_tasks(NAME, config, argv)
        return
    if config.model.path is None:
        exit_with_usage_error(NAME, "no model: add --model DIR, or path to [model] of the config")
    if config.data.source is None:
        exit_with_usage_error(NAME, "no data: add --data FILE, or source to [data] of the config, or [[tasks]]")
    # Imported here, so that --help and config errors do not wait for numpy and regex.
    from diffusionlm.evaluation.text_likelihood import open_text

    with usage_errors(NAME):
        text = open_text(config)
        if config.output.file is not None:
            check_can_write(config.output.file.parent, f"output.file = {config.output.file}")
    result = _evaluate(config, text)
    line = format_json(result)
    if config.output.file is not None:
        write_text_atomic(config.output.file, line + "\n")
    if config.output.format == "json":
        print(line)
    else:
        print_parts([format_table(result)])


def _evaluate(config: EvalConfig, text: OpenedText) -> LikelihoodResult:
    # Imported here, so that no error before waits for torch.
    from diffusionlm.checkpoints.huggingface import load_configured_model
    from diffusionlm.evaluation.text_likelihood import evaluate_likelihood
    from logger.console import ProgressMeter

    with closing(ProgressMeter(sys.stderr, is_transient=True)) as meter:

        def show_progress(phase: str, done: int, total: int | None) -> None:
            if phase != meter.name:
                meter.begin(phase, UNITS_OF_PHASES[phase], total)
            meter.set(done)

        return evaluate_likelihood(text, show_progress, load_configured_model(config.model))


def format_json(result: LikelihoodResult) -> str:
    """Format as one JSON object on one line; numbers that are not finite are null."""
    return json.dumps(_replace_not_finite(asdict(result)), allow_nan=False)


def _replace_not_finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _replace_not_finite(item) for key, item in value.items()}
    return [_replace_not_finite(item) for item in value] if isinstance(value, list | tuple) else value


def format_table(result: LikelihoodResult) -> Part:
    sign = "" if result.is_exact else "<= "
    nats = _format_with_error(result.nats_per_token, result.nats_per_token_standard_error)
    perplexity = _format_with_error(result.perplexity, result.perplexity_standard_error)
    bits = _format_with_error(result.bits_per_byte, result.bits_per_byte_standard_error)
    lines = [
        (result.method, f"{sign}{nats} nats per token"),
        ("", f"{sign}{perplexity} perplexity"),
        ("", f"{sign}{bits} bits per byte"),
        ("scored", f"{result.num_tokens:,} tokens, {result.num_bytes:,} bytes"),
        ("rows", f"{result.num_rows:,} of up to {result.row_length:,} tokens"),
    ]
    if result.prompt_gap is not None:
        gap = _format_with_error(result.prompt_gap.nats_per_token, result.prompt_gap.standard_error)
        lines.append(("prompts", f"{gap} nats per token more with the prompts of other conversations"))
    if result.num_unscored_tokens:
        why = "the model cannot predict the first token of a document"
        lines.append(("not scored", f"{result.num_unscored_tokens:,} tokens: {why}; see data.begin_with_eos"))
    if result.num_forwards is not None:
        tokens_per_forward = result.num_tokens / result.num_forwards
        lines.append(("forwards", f"{result.num_forwards:,} of one document, {tokens_per_forward:.2f} tokens each"))
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in result.skipped_documents.items())
    lines.append(("documents skipped", reasons or "none"))
    if result.by_masked_fraction:
        group = "row" if result.block_length is None else "block"
        lines.append(("cross-entropy by", f"masked fraction of the {group}, nats per masked token"))
    lines += [(f"  {low:.0%} - {high:.0%}", f"{value:.3f}") for low, high, value in result.by_masked_fraction]
    return Table((), lines)


def _format_with_error(value: float, error: float) -> str:
    return f"{value:.3f} (no error: a single row)" if math.isinf(error) else f"{value:.3f} +- {error:.3f}"
