"""``diffusionlm-convert``: write a model directory with another dtype or family, or for diffusion."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cli.arguments import Shorthand, parse_command
from cli.entry import friendly_errors, usage_errors
from config.convert import ConvertConfig
from diffusionlm.families.hub import ADAPTER_FILES, check_token, push_directory
from diffusionlm.families.model_directory import resolve_model_directory
from files.usage_error import UsageError
from logger.pages import Table
from logger.pages.terminal import print_parts

if TYPE_CHECKING:
    from diffusionlm.checkpoints.convert import Conversion

NAME = "diffusionlm-convert"

EXAMPLE = f"""  {NAME} --source Qwen/Qwen3-0.6B --target models/qwen3-mask --set diffusion.block_length=4 --dry-run
  {NAME} --source runs/quickstart --target models/quickstart --set dtype=bfloat16
  {NAME} --source Qwen/Qwen3-0.6B --adapter adapters/mine --target models/merged
  {NAME} --source runs/quickstart --push OWNER/NAME"""


@friendly_errors(NAME)
def main(argv: Sequence[str] | None = None) -> None:
    config, arguments = parse_command(
        ConvertConfig,
        name=NAME,
        description="Convert a model (dtype, family, adapter merged, mask token added), or push it to the Hub.",
        example=EXAMPLE,
        config_required=False,
        add_arguments=_add_arguments,
        shorthands=[
            Shorthand("--source", "DIR", "source={string}", "model, checkpoint or run, or org/name on the Hub"),
            Shorthand("--target", "DIR", "target={string}", "directory to write"),
            Shorthand("--adapter", "DIR", "adapter={string}", "PEFT adapter (LoRA) to merge into the weights"),
            Shorthand("--push", "OWNER/NAME", "push={string}", "upload the target, or without one the source"),
            Shorthand("--private", None, "private=true", "push to a private repository only"),
        ],
        argv=argv,
    )
    if config.source is None:
        raise UsageError("source is missing: add --source DIR")
    if config.target is None and config.push is None:
        raise UsageError("target is missing: add --target DIR, or --push OWNER/NAME to upload the source")
    # Imported here, so that --help and config errors do not wait for torch.
    from diffusionlm.checkpoints.convert import convert, prepare_conversion
    from diffusionlm.checkpoints.model_files import check_weight_files

    with usage_errors():
        if config.push is not None and not arguments.dry_run:
            check_token()
        conversion = None if config.target is None else prepare_conversion(config)
        if conversion is not None and not arguments.dry_run:
            check_weight_files(config.source)
        is_adapter = (config.source / ADAPTER_FILES[0]).is_file()  # it may have no config.json
        pushed = config.target or (config.source if is_adapter else resolve_model_directory(config.source))
    push = [] if config.push is None else [Table((), [("push", f"{pushed} to {config.push} on the Hugging Face Hub")])]
    print_parts([*([] if conversion is None else [tabulate_conversion(conversion)]), *push])
    if conversion is not None and not arguments.dry_run:
        convert(conversion)
    if config.push is not None and not arguments.dry_run:
        print(f"pushed: {push_directory(pushed, config.push, private=config.private)}")


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
        rows.append(("committed text", "block-causal" if target.clean_alignment is None else "token-causal"))
    if conversion.unties_head:
        rows.append(("head", "a copy of the embedding"))
    family = get_family(target)
    dtype = "the dtype of the source" if config.dtype == "keep" else config.dtype
    rows.append(("target", f"{conversion.target}: {family.model_type} ({family.architecture}), {dtype}"))
    return Table((), rows)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="print the steps without writing anything")
