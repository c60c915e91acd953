"""``diffusionlm-convert``: write a model directory with another dtype or family, or for diffusion."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cli.arguments import Shorthand, parse_command
from cli.entry import exit_with_usage_error, friendly_errors, usage_errors
from config.convert import ConvertConfig
from files.terminal_text import print_line
from logger.pages import Table
from logger.pages.terminal import print_parts

if TYPE_CHECKING:
    from diffusionlm.checkpoints.convert import Conversion

NAME = "diffusionlm-convert"

EXAMPLE = f"""  {NAME} --source Qwen/Qwen3-0.6B --target models/qwen3-mask --set diffusion.block_length=4 --dry-run
  {NAME} --source runs/quickstart --target models/quickstart --set dtype=bfloat16
  {NAME} --source Qwen/Qwen3-0.6B --adapter adapters/mine --target models/merged"""


@friendly_errors(NAME)
def main(argv: Sequence[str] | None = None) -> None:
    config, arguments = parse_command(
        ConvertConfig,
        name=NAME,
        description="Write a model in another form: dtype, family, adapter merged, mask token added.",
        example=EXAMPLE,
        config_required=False,
        add_arguments=_add_arguments,
        shorthands=[
            Shorthand("--source", "DIR", "source={string}", "model, checkpoint or run, or org/name on the Hub"),
            Shorthand("--target", "DIR", "target={string}", "directory to write"),
            Shorthand("--adapter", "DIR", "adapter={string}", "PEFT adapter (LoRA) to merge into the weights"),
        ],
        argv=argv,
    )
    if config.source is None or config.target is None:
        missing = "source" if config.source is None else "target"
        exit_with_usage_error(NAME, f"{missing} is missing: add --{missing} DIR")
    # Imported here, so that --help and config errors do not wait for torch.
    from diffusionlm.checkpoints.convert import convert, prepare_conversion
    from diffusionlm.checkpoints.model_files import check_weight_files

    with usage_errors(NAME):
        conversion = prepare_conversion(config)
        if not arguments.dry_run:
            check_weight_files(config.source)
    print_parts([tabulate_conversion(conversion)])
    if not arguments.dry_run:
        convert(conversion)
        print_line(f"next: uv run diffusionlm-analyze {conversion.source} {conversion.target}")


def tabulate_conversion(conversion: Conversion) -> Table:
    """Tabulate what a conversion reads, changes and writes."""
    from diffusionlm.checkpoints.model_files import is_adapter_checkpoint
    from diffusionlm.families.registry import get_family

    config, source, target = conversion.config, conversion.source_config, conversion.target_config
    layers = f"{source.num_hidden_layers} layers, {source.vocab_size:,} rows of the embedding"
    rows = [("source", f"{conversion.source}: {layers}")]
    if config.adapter is not None or is_adapter_checkpoint(conversion.source):
        rows.append(("merged adapter", str(config.adapter or "that of the source")))
    if config.diffusion is not None:
        row = "its row as it is"
        if conversion.new_row is not None:
            kind = "a new row" if conversion.new_row >= source.vocab_size else "an existing row"
            row = f"{kind}, set to {config.diffusion.mask_row or 'mean'}"
        rows.append(("mask token", f"{config.diffusion.mask_token!r}, id {target.mask_token_id}: {row}"))
        rows.append(("block length", str(target.block_length or "none: one block for all")))
        rows.append(("logit alignment", target.logit_alignment))
    if conversion.unties_head:
        rows.append(("head", "a copy of the embedding"))
    family = get_family(target)
    dtype = "the dtype of the source" if config.dtype == "keep" else config.dtype
    rows.append(("target", f"{conversion.target}: {family.model_type} ({family.architecture}), {dtype}"))
    return Table((), rows)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="print the steps without writing anything")
