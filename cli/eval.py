"""``diffusionlm-eval``: the likelihood of a text under a model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from cli.arguments import FlagShorthand, ValueShorthand, friendly_errors, parse_command, toml_string
from config.eval import EvalConfig

NAME = "diffusionlm-eval"

EXAMPLE = f"""  {NAME} --model runs/quickstart --data README.md
  {NAME} --model runs/blocks --data "texts/*.jsonl" --set likelihood.block_length=16 --json
  {NAME} --model runs/quickstart --data README.md --set likelihood.kind=sampler \\
      --set likelihood.generation.remasking_strategy=entropy"""


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, load the config, evaluate, print."""
    config, _ = parse_command(
        EvalConfig,
        name=NAME,
        description="Nats per token, perplexity and bits per byte of a text, each with its standard error.",
        example=EXAMPLE,
        config_required=False,
        add_arguments=_add_shorthands,
        argv=argv,
    )
    problem = _find_missing_option(config)
    if problem is not None:
        print(f"{NAME}: error: {problem}", file=sys.stderr)
        raise SystemExit(2)
    with friendly_errors(NAME):
        # Only now, so that --help and config errors do not wait for torch.
        from diffusionlm.evaluation.text_likelihood import evaluate_likelihood

        result = evaluate_likelihood(config)
        print(result.to_json() if config.output.format == "json" else result.to_text())


def _find_missing_option(config: EvalConfig) -> str | None:
    if config.model.path is None:
        return "no model given: add --model DIR, or path to [model] of the config"
    if config.data.source is None:
        return "no data given: add --data FILE, or source to [data] of the config"
    return None


def _add_shorthands(parser: argparse.ArgumentParser) -> None:
    """Arguments that stand for overrides, so that --print-config shows what they do."""
    group = parser.add_argument_group("shorthands for --set")
    group.add_argument(
        "--model", metavar="DIR", action=ValueShorthand, const="model.path", help="model, checkpoint or run"
    )
    group.add_argument("--data", metavar="FILE", action=_FilesShorthand, help="file, directory or glob, all of it")
    group.add_argument("--json", action=FlagShorthand, nargs=0, const='output.format="json"', help="one JSON object")


class _FilesShorthand(argparse.Action):
    """A source of files, in place of the config's."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        source = ("data.source=files", f"data.source.paths=[{toml_string(values)}]", 'data.split="all"')
        namespace.overrides = [*namespace.overrides, *source]


if __name__ == "__main__":
    main()
