"""``diffusionlm-convert``: one model directory to another."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cli.arguments import ValueShorthand, friendly_errors, parse_command
from config.convert import ConvertConfig

NAME = "diffusionlm-convert"

EXAMPLE = f"""  {NAME} --source Qwen3-0.6B --target models/qwen3-mask --set diffusion.block_length=4 --dry-run
  {NAME} --source runs/quickstart --target models/quickstart --set dtype=bfloat16"""


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, load the config, plan, convert."""
    config, arguments = parse_command(
        ConvertConfig,
        name=NAME,
        description="Write a model directory anew: another dtype, other shards, or with a mask token for diffusion.",
        example=EXAMPLE,
        config_required=False,
        add_arguments=_add_arguments,
        argv=argv,
    )
    missing = next((name for name in ("source", "target") if getattr(config, name) is None), None)
    if missing is not None:
        print(f"{NAME}: error: no {missing} given: add --{missing} DIR", file=sys.stderr)
        raise SystemExit(2)
    with friendly_errors(NAME):
        # Only now, so that --help and config errors do not wait for torch.
        from diffusionlm.checkpoints.convert import convert, plan_conversion

        plan = plan_conversion(config)
        if arguments.dry_run:
            print("\n".join(plan.descriptions))
            return
        convert(plan, config, print)
        print(f"next: uv run diffusionlm-analyze {plan.source} {config.target}")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="print what would be done, and write nothing")
    group = parser.add_argument_group("shorthands for --set")
    for name, what in (("source", "model, checkpoint or run directory"), ("target", "directory that is written")):
        group.add_argument(f"--{name}", metavar="DIR", action=ValueShorthand, const=name, help=what)


if __name__ == "__main__":
    main()
