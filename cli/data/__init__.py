"""``diffusionlm-data``: show the rows that a training run reads: prompts, targets, padding, and what is left out."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from cli.arguments import toml_string
from cli.entry import build_parser, exit_with_usage_error, friendly_errors, path_argument, usage_errors
from config.data import DataConfig
from config.load import ConfigError, load_config
from config.train import TrainConfig
from logger.pages.terminal import print_parts

NAME = "diffusionlm-data"

EXAMPLE = f"""  {NAME} --config config/resources/train.toml --rows 2
  {NAME} chats.jsonl --tokenizer models/qwen3 --block-length 4
  {NAME} chats.jsonl --tokenizer models/qwen3 --set 'source.chat.columns={{prompt="question", completion="answer"}}'
  {NAME} chats.jsonl --tokenizer runs/quickstart --template chatml --json | jq .counts"""

DEFAULT_ROW_LENGTH = 1_024


@friendly_errors(NAME)
def main(argv: Sequence[str] | None = None) -> None:
    arguments = _build_parser().parse_args(argv)
    config = _load_train_config(arguments)
    # Imported here, so that --help and config errors do not wait.
    from cli.data.rows import (
        RowSettings,
        count_rows,
        format_counts,
        format_row,
        read_rows,
        row_to_json,
        settings_of_config,
    )
    from diffusionlm.checkpoints.model_files import load_tokenizer
    from diffusionlm.data.pipeline import open_components

    if config is not None:
        settings = settings_of_config(config, arguments.split)
    else:
        data = _load_data_config(arguments)
        with usage_errors(NAME):
            components, tokenizer = open_components(data, arguments.split), load_tokenizer(arguments.tokenizer)
        row_length = arguments.row_length or DEFAULT_ROW_LENGTH
        settings = RowSettings(data, components, tokenizer, row_length, arguments.block_length)
    rows, counts = count_rows(read_rows(settings), settings, arguments.rows)
    if arguments.json:
        shown = [row_to_json(row, settings.tokenizer) for row in rows]
        print(json.dumps({"rows": shown, "counts": counts}, ensure_ascii=False))
        return
    parts = [
        part for number, row in enumerate(rows, 1) for part in format_row(row, number, settings, is_full=arguments.full)
    ]
    print_parts([*parts, *format_counts(counts, settings)])


def _load_train_config(arguments: argparse.Namespace) -> TrainConfig | None:
    """Load the training config; None if there are files instead."""
    if (arguments.config is None) == (not arguments.files):
        exit_with_usage_error(NAME, "name either --config FILE.toml, or files with --tokenizer DIR")
    if arguments.config is None:
        if arguments.tokenizer is None:
            exit_with_usage_error(NAME, "no tokenizer: add --tokenizer DIR, a model, a run or a tokenizer")
        return None
    for name in ("tokenizer", "template", "row_length", "block_length"):
        if getattr(arguments, name) is not None:
            exit_with_usage_error(NAME, f"--{name.replace('_', '-')} is for files; with --config, use --set")
    try:
        return load_config(TrainConfig, arguments.config, arguments.overrides)
    except ConfigError as error:
        exit_with_usage_error(NAME, str(error))


def _load_data_config(arguments: argparse.Namespace) -> DataConfig:
    """The section [data] of a run that reads conversations from the files, in their order."""
    paths = ", ".join(map(toml_string, arguments.files))
    # Bad records are counted, not refused: that is what a person looks for.
    overrides = ['source={kind="files", on_bad_row="skip"}', f"source.paths=[{paths}]"]
    overrides += ["source.chat={}", "document_shuffle_window=0", "row_shuffle_window=0"]
    if arguments.split == "train":  # nothing is held out, so that every record is counted
        overrides.append(f"source.validation_paths=[{paths}]")
    if arguments.template is not None:
        overrides.append(f"source.chat.template={toml_string(arguments.template)}")
    try:
        return load_config(DataConfig, None, [*overrides, *arguments.overrides])
    except ConfigError as error:
        exit_with_usage_error(NAME, str(error))


def _positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _count(text: str) -> int:
    return 0 if text == "0" else _positive_int(text)


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
    group.add_argument("--row-length", metavar="N", type=_positive_int, help=f"default: {DEFAULT_ROW_LENGTH:,}")
    group.add_argument(
        "--block-length", metavar="N", type=_positive_int, help="of block diffusion; default: masked diffusion"
    )
    return parser
