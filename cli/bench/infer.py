"""``diffusionlm-bench-infer``: decoding speed, forwards and memory over a grid of settings."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from cli.arguments import add_shorthand, parse_command
from cli.entry import friendly_errors
from config.bench.inference import BenchInferConfig
from files.terminal_text import print_line

NAME = "diffusionlm-bench-infer"

EXAMPLE = f"""  {NAME} --config config/resources/bench_infer.toml --set output.path=runs/bench_infer.json
  {NAME} --config config/resources/bench_infer.toml --model runs/blocks/4 --set bench.memory=false"""


@friendly_errors(NAME)
def main(argv: Sequence[str] | None = None) -> None:
    config, _ = parse_command(
        BenchInferConfig,
        name=NAME,
        description="Measure tokens per second, forwards and memory of decoding, all cells of a grid in turn.",
        example=EXAMPLE,
        add_arguments=_add_shorthands,
        argv=argv,
    )
    # Only now, so that --help and config errors do not wait for torch.
    from benchmarking.bench_infer import bench_infer

    print_line(bench_infer(config).to_markdown())


def _add_shorthands(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("shorthands for --set")
    add_shorthand(group, "--model", "model.path={string}", metavar="DIR", help="in place of random weights")


if __name__ == "__main__":
    main()
