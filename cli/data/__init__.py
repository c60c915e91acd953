"""``diffusionlm-data``: show the rows that a training run reads: prompts, targets, padding, and what is left out."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from cli.arguments import parse_command, positive_int, toml_string, toml_strings
from cli.entry import friendly_errors, usage_errors
from config.train import TrainConfig
from logger.pages.terminal import print_parts

NAME = "diffusionlm-data"

EXAMPLE = f"""  {NAME} --config config/resources/train.toml --rows 2
  {NAME} chats.jsonl --tokenizer models/qwen3 --block-length 4
  {NAME} chats.jsonl --tokenizer models/qwen3 --set 'source.chat.columns={{prompt="question", completion="answer"}}'
  {NAME} chats.jsonl --tokenizer runs/quickstart --template chatml --json | jq .counts"""

SMALL_MODEL = (
    "{hidden_size=1, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=2, "
    "intermediate_size=1, max_position_embeddings=%d}"
)
"""Of a run that reads files: rows do not depend on it."""


@friendly_errors(NAME)
def main(argv: Sequence[str] | None = None) -> None:
    config, arguments = parse_command(
        TrainConfig,
        name=NAME,
        description="Show the rows that a training run reads, and count what is learned, padded and left out.",
        example=EXAMPLE,
        config_required=False,
        add_arguments=_add_arguments,
        argv=argv,
    )
    # Imported here, so that --help and config errors do not wait.
    from cli.data.rows import RowSource, count_rows, format_counts, format_row, read_rows, row_to_json

    with usage_errors():
        source = RowSource.open(config, arguments.split)
    rows, counts = count_rows(read_rows(source), source, arguments.rows)
    if arguments.json:
        shown = [row_to_json(row, source.tokenizer, source.processor) for row in rows]
        print(json.dumps({"rows": shown, "counts": counts}, ensure_ascii=False))
        return
    parts = [
        part for number, row in enumerate(rows, 1) for part in format_row(row, number, source, is_full=arguments.full)
    ]
    print_parts([*parts, *format_counts(counts, source)])


def _list_overrides(arguments: argparse.Namespace) -> list[str]:
    """The config of a run that reads conversations from the files, in their order."""
    if (arguments.config is None) == (not arguments.files):
        raise ValueError("name either --config FILE.toml, or files with --tokenizer DIR")
    if arguments.config is not None:
        if any((arguments.tokenizer, arguments.template, arguments.row_length, arguments.block_length)):
            raise ValueError("--tokenizer, --template, --row-length and --block-length are for files; use --set")
        return []
    if arguments.tokenizer is None:
        raise ValueError("no tokenizer: add --tokenizer DIR, a model, a run or a tokenizer")
    arguments.overrides = [f"data.{override}" for override in arguments.overrides]
    paths = toml_strings(arguments.files)
    # Bad records are counted, not refused: that is what a person looks for.
    data = ['source={kind="files", on_bad_row="skip"}', f"source.paths={paths}", "source.chat={}"]
    data += ["document_shuffle_window=0", "row_shuffle_window=0"]
    if arguments.split == "train":  # nothing is held out, so that every record is counted
        data.append(f"source.validation_paths={paths}")
    if arguments.template is not None:
        data.append(f"source.chat.template={toml_string(arguments.template)}")
    run = ["run.directory=unused", "training={max_steps=1, batch_size=1}", "optimizer.learning_rate=1"]
    run += [
        f"model={SMALL_MODEL % (arguments.row_length or 1024)}",
        f"tokenizer.path={toml_string(arguments.tokenizer)}",
    ]
    if arguments.block_length is not None:
        run.append(f'objective={{kind="block_diffusion", block_length={arguments.block_length}}}')
    return [*run, *(f"data.{override}" for override in data)]


def _count(text: str) -> int:
    return 0 if text == "0" else positive_int(text)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(list_overrides=_list_overrides)
    text = "files of conversations, in place of --config; --set is then of [data], such as source.chat.turns=all"
    parser.add_argument("files", metavar="FILE", nargs="*", help=text)
    text = "split (default: train, which is everything in files)"
    parser.add_argument("--split", choices=("train", "validation"), default="train", help=text)
    parser.add_argument("--rows", metavar="N", type=_count, default=3, help="rows to show (default: 3)")
    parser.add_argument("--full", action="store_true", help="show all tokens of these rows; without it some of each")
    parser.add_argument("--json", action="store_true", help="one JSON object: rows and counts")
    group = parser.add_argument_group("for files")
    group.add_argument("--tokenizer", metavar="DIR", help="tokenizer, model or run, with its chat template")
    group.add_argument("--template", metavar="NAME", help="built-in template, file or directory")
    group.add_argument("--row-length", metavar="N", type=positive_int, help="default: 1,024")
    group.add_argument(
        "--block-length", metavar="N", type=positive_int, help="of block diffusion; default: masked diffusion"
    )
