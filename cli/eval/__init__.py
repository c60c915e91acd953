"""``diffusionlm-eval``: tasks, and the likelihood of a text under a model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from cli.arguments import parse_command
from cli.entry import exit_with_usage_error, friendly_errors, usage_errors
from cli.eval.arguments import add_eval_arguments
from cli.eval.tables import format_json, format_table
from cli.tables import print_parts
from config.eval import EvalConfig
from files.atomic import write_text_atomic
from files.output_paths import check_can_write

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

PROGRESS_DELAY_SECONDS = 3.0
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
    from logger.progress import ProgressMeter

    with closing(ProgressMeter(sys.stderr, delay_seconds=PROGRESS_DELAY_SECONDS, leave=False)) as meter:

        def show_progress(phase: str, done: int, total: int | None) -> None:
            if phase != meter.name:
                meter.begin(phase, UNITS_OF_PHASES[phase], total)
            meter.set(done)

        return evaluate_likelihood(text, show_progress, load_configured_model(config.model))
