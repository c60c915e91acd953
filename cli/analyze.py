"""``diffusionlm-analyze``: describe a model directory, or compare two."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cli.arguments import Shorthand, parse_command, toml_string
from cli.entry import friendly_errors, usage_errors
from config.convert import AnalyzeConfig
from files.usage_error import UsageError
from logger.pages import Part, Table
from logger.pages.terminal import print_parts

if TYPE_CHECKING:
    from diffusionlm.checkpoints.analyze import Analysis, TensorInfo, TensorPair

NAME = "diffusionlm-analyze"

EXAMPLE = f"""  {NAME} runs/quickstart
  {NAME} Qwen/Qwen3-0.6B runs/adapted --json
  {NAME} runs/adapter models/merged
  {NAME} a b --set values=false --set max_rows=0"""


@friendly_errors(NAME)
def main(argv: Sequence[str] | None = None) -> None:
    config, _ = parse_command(
        AnalyzeConfig,
        name=NAME,
        description="Compare the configs and the tensor names, shapes and values of two models; merge adapters first.",
        example=EXAMPLE,
        config_required=False,
        add_arguments=_add_models,
        shorthands=[Shorthand("--json", None, 'format="json"', "print one JSON object")],
        argv=argv,
    )
    if config.a is None:
        raise UsageError("no model: name one or two model directories")
    # Imported here, so that no error before waits for torch.
    from diffusionlm.checkpoints.analyze import analyze

    with usage_errors():  # all that it does is to read files
        if config.b is None:
            print_parts(format_directory(config.a, config.max_rows))
            return
        analysis = analyze(config.a, config.b, values=config.values)
    if config.format == "json":
        print(analysis.to_json())
    else:
        print_parts(format_analysis(analysis, config.max_rows))


def _add_models(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(list_overrides=_list_overrides)
    parser.add_argument("a", metavar="A", nargs="?", help="model, checkpoint or run directory, or org/name on the Hub")
    parser.add_argument("b", metavar="B", nargs="?", help="model to compare with")


def _list_overrides(arguments: argparse.Namespace) -> list[str]:
    return [f"{key}={toml_string(path)}" for key in "ab" if (path := getattr(arguments, key)) is not None]


def format_directory(directory: Path, max_rows: int) -> list[Part]:
    """Format a table of a directory's tensors. ``max_rows`` 0: all of them."""
    from diffusionlm.checkpoints.analyze import read_model

    tensors = list(read_model(directory)[2].values())
    num_values = sum(info.num_elements for info in tensors)
    rows = [[info.name, _format_shape(info), info.dtype, info.file] for info in tensors]
    return [f"{directory}: {len(tensors)} tensors, {num_values:,} values", "", *_format_table(rows, max_rows)]


def format_analysis(analysis: Analysis, max_rows: int) -> list[Part]:
    """Format tables of the differences. ``max_rows`` 0: all rows of each table."""
    equal = [pair for pair in analysis.pairs if pair.max_difference == 0.0]
    note = "is an adapter: merged and rounded once; other merges may differ by a rounding, 0.008 of a bfloat16"
    parts: list[Part] = [*(f"{side} {note}" for side in analysis.merged), f"{len(equal)} tensors are equal"]
    for title, rows in (
        ("config.json differs in", [[key, json.dumps(a), json.dumps(b)] for key, a, b in analysis.config_differences]),
        (
            "kinds of tensors that differ (number, largest difference)",
            _format_kinds([pair for pair in analysis.pairs if pair.max_difference]),
        ),
        (
            "other pairs (largest difference, relative root mean square)",
            [_format_pair(pair) for pair in analysis.pairs if pair not in equal],
        ),
        ("only in a", [[info.name, _format_shape(info), info.dtype] for info in analysis.only_a]),
        ("only in b", [[info.name, _format_shape(info), info.dtype] for info in analysis.only_b]),
    ):
        if rows:
            parts += ["", f"{title}:", "", *_format_table(rows, max_rows)]
    return parts


def _format_kinds(pairs: Sequence[TensorPair]) -> list[list[str]]:
    """Summarize pairs whose names differ in numbers, of layers and experts, only."""
    kinds: dict[str, list[float]] = {}
    for pair in pairs:
        kinds.setdefault(re.sub(r"\.\d+\.", ".*.", pair.a.name), []).append(pair.max_difference or 0.0)
    if len(kinds) == len(pairs):
        return []
    return [[kind, str(len(values)), f"{max(values):.3g}"] for kind, values in kinds.items()]


def _format_pair(pair: TensorPair) -> list[str]:
    name = pair.a.name if pair.a.name == pair.b.name else f"{pair.a.name} = {pair.b.name}"
    shapes = [_format_shape(pair.a)] + ([] if pair.a.shape == pair.b.shape else [_format_shape(pair.b)])
    dtypes = dict.fromkeys([pair.a.dtype, pair.b.dtype])
    differences = (pair.max_difference, pair.relative_difference)
    numbers = ["-" if difference is None else f"{difference:.3g}" for difference in differences]
    return [name, " / ".join(shapes), " / ".join(dtypes), *numbers]


def _format_shape(info: TensorInfo) -> str:
    return "x".join(map(str, info.shape)) or "scalar"


def _format_table(rows: Sequence[Sequence[str]], max_rows: int) -> list[Part]:
    visible = rows[:max_rows] if max_rows else rows
    table = Table((), [["", *row] for row in visible])  # the empty cell indents
    if len(visible) == len(rows):
        return [table]
    return [table, f"  ... and {len(rows) - len(visible)} more; set max_rows = 0 to see all"]
