"""``diffusionlm-eval``: tasks, and the likelihood of a text under a model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, get_args

from pydantic import TypeAdapter

from cli.arguments import ADAPTER, Shorthand, parse_command, require_model, toml_string, toml_strings
from cli.entry import friendly_errors, usage_errors
from config.eval import EvalConfig
from config.evaluation.presets import describe_kind, get_preset
from config.evaluation.tasks import AnyTask
from files.atomic import write_text_atomic
from files.paths import check_can_write
from files.toml_text import parse_toml
from files.usage_error import UsageError
from logger.pages import Cell, Number, Part, Table, format_cell
from logger.pages.terminal import print_parts

if TYPE_CHECKING:
    from diffusionlm.evaluation.text_likelihood import LikelihoodResult

NAME = "diffusionlm-eval"

EXAMPLE = f"""  {NAME} --model runs/quickstart --task gsm8k --data test.jsonl --limit 100 --output runs/gsm8k
  {NAME} --model runs/a --model runs/b --task multiple_choice --data arc.jsonl --output runs/arc
  {NAME} --model runs/chat --task gsm8k --data test.jsonl --output runs/sweep \\
      --vary generation.remasking_strategy=entropy,topk_margin --vary generation.block_length=8,32
  {NAME} --model runs/quickstart --data README.md
  {NAME} --model runs/blocks --data "texts/*.jsonl" --set likelihood.block_length=16 --json
  {NAME} --model runs/quickstart --data README.md --set likelihood.kind=sampler \\
      --set likelihood.generation.remasking_strategy=entropy"""

_SHORTHANDS = (
    ADAPTER,
    Shorthand(
        "--shots-data", "FILE", "tasks.0.prompt.shots_data={string}", "file of the examples before each question"
    ),
    Shorthand("--run-code", None, "tasks.0.run_code=true", "allow to execute code that the model has written"),
    Shorthand("--output", "DIR", "output.directory={string}", "folder of the results of tasks"),
    Shorthand("--json", None, 'output.format="json"', "one JSON object"),
)

TASK_KINDS = tuple(kind.model_fields["kind"].default for kind in get_args(AnyTask))


@friendly_errors(NAME, "lower batch_size of the task or of [likelihood]")
def main(argv: Sequence[str] | None = None) -> None:
    config, _ = parse_command(
        EvalConfig,
        name=NAME,
        description="Accuracy on tasks, or nats per token, perplexity and bits per byte of a text, with their errors.",
        example=EXAMPLE,
        config_required=False,
        add_arguments=_add_arguments,
        shorthands=_SHORTHANDS,
        argv=argv,
    )
    if config.tasks:
        # Imported here, so that --help and config errors do not wait for numpy and regex.
        from cli.eval.task_run import run_tasks

        run_tasks(NAME, config, argv)
        return
    require_model(config.model.path)
    if config.data.source is None:
        raise UsageError("no data: add --data FILE, or source to [data] of the config, or [[tasks]]")
    # Imported here, so that --help and config errors do not wait for numpy and regex.
    from diffusionlm.evaluation.text_likelihood import OpenedText

    with usage_errors():
        text = OpenedText(config)
        if config.output.file is not None:
            check_can_write(config.output.file.parent, f"output.file = {config.output.file}")
    # Imported here, so that no error before waits for torch.
    from diffusionlm.checkpoints.huggingface import load_configured_model
    from diffusionlm.evaluation.text_likelihood import LikelihoodResult, evaluate_likelihood
    from logger.console import ProgressMeter

    with closing(ProgressMeter(sys.stderr, is_transient=True)) as meter:
        result = evaluate_likelihood(text, load_configured_model(config.model), meter.advance)
    # Numbers that are not finite are null.
    line = TypeAdapter(LikelihoodResult).dump_json(result).decode()
    if config.output.file is not None:
        write_text_atomic(config.output.file, line + "\n")
    if config.output.format == "json":
        print(line)
    else:
        print_parts([format_table(result)])


def format_table(result: LikelihoodResult) -> Part:
    """Tabulate the numbers with their errors, and what they are of."""
    rows: list[list[Cell]] = [["method", result.method]]
    for name in ("nats_per_token", "perplexity", "bits_per_byte"):
        number = Number(getattr(result, name), ".3f", getattr(result, f"{name}_standard_error"))
        rows.append([_format_name(name), ("" if result.is_exact else "<= ") + format_cell(number)])
    if result.prompt_gap is not None:
        gap = Number(result.prompt_gap.nats_per_token, ".3f", result.prompt_gap.standard_error)
        rows.append(["more with the prompts of other conversations, nats per token", gap])
    counts = ("num_tokens", "num_bytes", "num_rows", "row_length", "num_forwards", "num_unscored_tokens")
    rows += [[_format_name(name), f"{getattr(result, name):,}"] for name in counts if getattr(result, name)]
    skipped = [f"{count:,} {reason}" for reason, count in result.skipped_documents.items()]
    rows.append(["skipped documents", ", ".join(skipped) or "none"])
    group = "row" if result.block_length is None else "block"
    for low, high, value in result.by_masked_fraction:
        rows.append([f"nats per masked token, {low:.0%} - {high:.0%} of the {group} masked", Number(value, ".3f")])
    note = "unscored: the first token of each document, which data.begin_with_eos = true lets the model predict"
    return Table((), rows, note=note if result.num_unscored_tokens else "")


def _format_name(name: str) -> str:
    return name.removeprefix("num_").replace("_", " ")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, the task and what is compared."""
    parser.set_defaults(list_overrides=_list_overrides)
    group = parser.add_argument_group("what is evaluated")
    for name, metavar, text in (
        ("--model", "DIR", "model, checkpoint or run, or org/name on the Hub; repeatable"),
        ("--vary", "SECTION.KEY=VALUE,VALUE...", "compare these values; repeatable"),
    ):
        group.add_argument(name, metavar=metavar, action="append", default=[], help=text)
    group.add_argument("--task", metavar="KIND", choices=TASK_KINDS, help="evaluate a task")
    group.add_argument("--preset", metavar="NAME", help="evaluate a task by a published protocol")
    text = "items of the task; without one a file, directory or glob of text"
    group.add_argument("--data", metavar="FILE", help=text)
    group.add_argument("--limit", metavar="N", help="evaluate a random subset of N items")


def _list_overrides(arguments: argparse.Namespace) -> Iterator[str]:
    """The overrides that the arguments stand for."""
    kind, data, models = arguments.task, arguments.data, arguments.model
    yield from (f"model.path={toml_string(model)}" for model in models[:1])
    if len(models) > 1:
        yield from (f"variants.{index}.model={toml_string(model)}" for index, model in enumerate(models))
    if arguments.preset is not None:
        kind = get_preset(arguments.preset).kind
        if kind is None:
            raise ValueError(f"--preset {arguments.preset}: {describe_kind(arguments.preset)}")
        yield f"tasks.0.preset={toml_string(arguments.preset)}"
    if kind is not None:
        yield f"tasks.0.kind={toml_string(kind)}"
    if data is not None and kind is not None:
        yield f"tasks.0.data={toml_string(data)}"
    elif data is not None:
        yield from ("data.source=files", f"data.source.paths={toml_strings([data])}", 'data.split="all"')
    if arguments.limit is not None:
        if kind == "perplexity":
            raise ValueError(
                f"--limit {arguments.limit} selects items, and --task {kind} reads a text: use --set "
                f"tasks.0.text.max_rows={arguments.limit}"
            )
        yield f"tasks.0.limit={arguments.limit}"
    for text in arguments.vary:
        key, _, values = text.partition("=")
        if not key.strip() or not values.strip():
            raise ValueError(f"--vary {text}: expected SECTION.KEY=VALUE,VALUE...")
        array = ", ".join(_to_toml_value(value.strip()) for value in values.split(","))
        yield f"vary.{toml_string(key.strip())}=[{array}]"


def _to_toml_value(text: str) -> str:
    """A number or a boolean as it is, any other text as a string."""
    try:
        table = parse_toml(f"v={text}")
    except ValueError:
        return toml_string(text)
    return text if list(table) == ["v"] else toml_string(text)
