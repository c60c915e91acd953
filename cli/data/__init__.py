"""``diffusionlm-data``: show the rows that a training run reads: prompts, targets, padding, and what is left out."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from cli.arguments import positive_int, toml_string, toml_strings
from cli.entry import build_parser, exit_with_usage_error, friendly_errors, path_argument, usage_errors
from config.load import ConfigError, load_config
from config.train import TrainConfig
from logger.pages.terminal import print_parts

NAME = "diffusionlm-data"

EXAMPLE = f"""  {NAME} --config config/resources/train.toml --rows 2
  {NAME} chats.jsonl --tokenizer models/qwen3 --block-length 4
  {NAME} chats.jsonl --tokenizer models/qwen3 --set 'source.chat.columns={{prompt="question", completion="answer"}}'
  {NAME} chats.jsonl --tokenizer runs/quickstart --template chatml --json | jq .counts"""

DEFAULT_ROW_LENGTH = 1_024

FILE_OPTIONS = ("tokenizer", "template", "row_length", "block_length")
"""Options that are keys of a config, where there is one."""

SMALL_MODEL = (
    "{{hidden_size=1, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=2, "
    "intermediate_size=1, max_position_embeddings={row_length}}}"
)
"""Of a run that reads files: rows do not depend on it."""


@friendly_errors(NAME)
def main(argv: Sequence[str] | None = None) -> None:
    arguments = _build_parser().parse_args(argv)
    config = _load_config(arguments)
    # Imported here, so that --help and config errors do not wait.
    from cli.data.rows import RowSource, count_rows, format_counts, format_row, read_rows, row_to_json

    with usage_errors(NAME):
        source = RowSource.open(config, arguments.split)
    rows, counts = count_rows(read_rows(source), source, arguments.rows)
    if arguments.json:
        shown = [row_to_json(row, source.tokenizer) for row in rows]
        print(json.dumps({"rows": shown, "counts": counts}, ensure_ascii=False))
        return
    parts = [
        part for number, row in enumerate(rows, 1) for part in format_row(row, number, source, is_full=arguments.full)
    ]
    print_parts([*parts, *format_counts(counts, source)])


def _load_config(arguments: argparse.Namespace) -> TrainConfig:
    """Load the training config, or make one that reads the files."""
    overrides = arguments.overrides
    if (arguments.config is None) == (not arguments.files):
        exit_with_usage_error(NAME, "name either --config FILE.toml, or files with --tokenizer DIR")
    if arguments.config is None:
        overrides = _override_files(arguments)
    for name in FILE_OPTIONS if arguments.config is not None else ():
        if getattr(arguments, name) is not None:
            exit_with_usage_error(NAME, f"--{name.replace('_', '-')} is for files; with --config, use --set")
    try:
        return load_config(TrainConfig, arguments.config, overrides)
    except ConfigError as error:
        exit_with_usage_error(NAME, str(error))


def _override_files(arguments: argparse.Namespace) -> list[str]:
    """The config of a run that reads conversations from the files, in their order."""
    if arguments.tokenizer is None:
        exit_with_usage_error(NAME, "no tokenizer: add --tokenizer DIR, a model, a run or a tokenizer")
    paths, row_length = toml_strings(arguments.files), arguments.row_length or DEFAULT_ROW_LENGTH
    # Bad records are counted, not refused: that is what a person looks for.
    data = ['source={kind="files", on_bad_row="skip"}', f"source.paths={paths}", "source.chat={}"]
    data += ["document_shuffle_window=0", "row_shuffle_window=0"]
    if arguments.split == "train":  # nothing is held out, so that every record is counted
        data.append(f"source.validation_paths={paths}")
    if arguments.template is not None:
        data.append(f"source.chat.template={toml_string(arguments.template)}")
    run = ["run.directory=unused", "training={max_steps=1, batch_size=1}", "optimizer.learning_rate=1"]
    run += [f"model={SMALL_MODEL.format(row_length=row_length)}", f"tokenizer.path={toml_string(arguments.tokenizer)}"]
    if arguments.block_length is not None:
        run.append(f'objective={{kind="block_diffusion", block_length={arguments.block_length}}}')
    return [*run, *(f"data.{override}" for override in (*data, *arguments.overrides))]


def _count(text: str) -> int:
    return 0 if text == "0" else positive_int(text)


def _build_parser() -> argparse.ArgumentParser:
    parser = build_parser(
        NAME,
        "Show the rows that a training run reads, and count what is learned, padded and left out. In color on a "
        "terminal.",
        EXAMPLE,
    )
    parser.add_argument("files", metavar="FILE", nargs="*", help="files of conversations, in place of --config")
    parser.add_argument("--config", metavar="FILE.toml", type=path_argument, help="config of a training run")
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        help="override a value of the config; with files, of its section [data], such as source.chat.turns=all",
    )
    parser.add_argument(
        "--split",
        choices=("train", "validation"),
        default="train",
        help="split (default: train, which is everything in files)",
    )
    parser.add_argument("--rows", metavar="N", type=_count, default=3, help="rows to show (default: 3)")
    parser.add_argument("--full", action="store_true", help="show all tokens of these rows; without it some of each")
    parser.add_argument("--json", action="store_true", help="one JSON object: rows and counts")
    group = parser.add_argument_group("for files")
    group.add_argument("--tokenizer", metavar="DIR", help="tokenizer, model or run, with its chat template")
    group.add_argument("--template", metavar="NAME", help="built-in template, file or directory")
    group.add_argument("--row-length", metavar="N", type=positive_int, help=f"default: {DEFAULT_ROW_LENGTH:,}")
    group.add_argument(
        "--block-length", metavar="N", type=positive_int, help="of block diffusion; default: masked diffusion"
    )
    return parser
