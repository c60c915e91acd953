"""``diffusionlm-eval``: the likelihood of a text under a model."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from cli.arguments import add_shorthand, parse_command
from cli.entry import exit_with_usage_error, friendly_errors, usage_errors
from cli.tables import make_table, print_parts
from config.eval import EvalConfig
from files.atomic import write_text_atomic
from files.output_paths import check_can_write

if TYPE_CHECKING:
    from rich.console import RenderableType

    from diffusionlm.evaluation.exact_match import ExactMatchReport
    from diffusionlm.evaluation.exact_match_plan import ExactMatchPlan
    from diffusionlm.evaluation.plan import EvaluationPlan
    from diffusionlm.evaluation.text_likelihood import LikelihoodResult

NAME = "diffusionlm-eval"

EXAMPLE = f"""  {NAME} --model runs/quickstart --data README.md
  {NAME} --model runs/blocks --data "texts/*.jsonl" --set likelihood.block_length=16 --json
  {NAME} --model runs/quickstart --data README.md --set likelihood.kind=sampler \\
      --set likelihood.generation.remasking_strategy=entropy"""

PROGRESS_DELAY_SECONDS = 3.0
UNITS_OF_PHASES = {"reading": "rows", "scoring": "forwards", "decoding": "tokens", "answering": "prompts"}


@friendly_errors(NAME)
def main(argv: Sequence[str] | None = None) -> None:
    config, _ = parse_command(
        EvalConfig,
        name=NAME,
        description="Nats per token, perplexity and bits per byte of a text, each with its standard error.",
        example=EXAMPLE,
        config_required=False,
        add_arguments=_add_shorthands,
        argv=argv,
    )
    if config.model.path is None:
        exit_with_usage_error(NAME, "no model: add --model DIR, or path to [model] of the config")
    if config.data.source is None and config.exact_match is None:
        exit_with_usage_error(NAME, "no data: add --data FILE, or source to [data] of the config, or [exact_match]")
    # Imported here, so that --help and config errors do not wait for numpy and regex.
    from diffusionlm.evaluation.exact_match_plan import plan_exact_match
    from diffusionlm.evaluation.plan import plan_evaluation

    with usage_errors(NAME):
        plan = None if config.data.source is None else plan_evaluation(config)
        exact_match_plan = None if config.exact_match is None else plan_exact_match(config)
        if config.output.file is not None:
            check_can_write(config.output.file.parent, f"output.file = {config.output.file}")
    result, exact_match = _evaluate(config, plan, exact_match_plan)
    text = format_json(result, exact_match)
    if config.output.file is not None:
        write_text_atomic(config.output.file, text + "\n")
    if config.output.format == "json":
        print(text)
        return
    if result is not None:
        print_parts([format_table(result)])
    if exact_match is not None:
        print_parts([format_exact_match(exact_match)])


def format_json(result: LikelihoodResult | None, exact_match: ExactMatchReport | None = None) -> str:
    """Format as one JSON object on one line; numbers that are not finite are null."""
    values = {} if result is None else asdict(result)
    if exact_match is not None:
        values["exact_match"] = asdict(exact_match)
    return json.dumps(_replace_not_finite(values), allow_nan=False)


def _replace_not_finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _replace_not_finite(item) for key, item in value.items()}
    return [_replace_not_finite(item) for item in value] if isinstance(value, list | tuple) else value


def format_exact_match(report: ExactMatchReport) -> RenderableType:
    """One row for each task, and one for all."""
    rows = [["prompts", "", "exact match", "stopped", "length - reference"]]
    for task, counts in [*report.by_task.items(), ("all", report)]:
        error = "" if math.isinf(counts.standard_error) else f" +- {counts.standard_error:.1%}"
        exact_match = f"{counts.exact_match:.1%}{error}"
        length = f"{counts.mean_length_difference:+.2f} tokens"
        rows.append([task, f"{counts.num_prompts:,}", exact_match, f"{counts.stop_rate:.1%}", length])
    return make_table(rows, has_header=True, right=(1,))


def format_table(result: LikelihoodResult) -> RenderableType:
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
    return make_table(lines)


def _evaluate(
    config: EvalConfig, plan: EvaluationPlan | None, exact_match_plan: ExactMatchPlan | None
) -> tuple[LikelihoodResult | None, ExactMatchReport | None]:
    # Imported here, so that no error before waits for torch.
    from diffusionlm.checkpoints.huggingface import load_configured_model
    from diffusionlm.evaluation.exact_match import evaluate_exact_match
    from diffusionlm.evaluation.text_likelihood import evaluate_likelihood
    from logger.progress import ProgressMeter

    with closing(ProgressMeter(sys.stderr, delay_seconds=PROGRESS_DELAY_SECONDS, leave=False)) as meter:

        def show_progress(phase: str, done: int, total: int | None) -> None:
            if phase != meter.name:
                meter.begin(phase, UNITS_OF_PHASES[phase], total)
            meter.set(done)

        model = load_configured_model(config.model)
        result = None if plan is None else evaluate_likelihood(plan, show_progress, model)
        if exact_match_plan is None:
            return result, None
        return result, evaluate_exact_match(model, exact_match_plan, partial(show_progress, "answering"))


def _format_with_error(value: float, error: float) -> str:
    return f"{value:.3f} (no error: a single row)" if math.isinf(error) else f"{value:.3f} +- {error:.3f}"


def _add_shorthands(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("shorthands for --set")
    add_shorthand(
        group, "--model", "model.path={string}", metavar="DIR", help="model, checkpoint or run, or org/name on the Hub"
    )
    add_shorthand(group, "--adapter", "model.adapter={string}", metavar="DIR", help="PEFT adapter (LoRA) of the model")
    files = ("data.source=files", "data.source.paths=[{string}]", 'data.split="all"')
    add_shorthand(group, "--data", *files, metavar="FILE", help="file, directory or glob, all of it")
    add_shorthand(group, "--json", 'output.format="json"', help="one JSON object")


if __name__ == "__main__":
    main()
