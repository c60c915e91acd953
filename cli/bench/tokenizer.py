"""``diffusionlm-bench-tokenizer``: speed of the tokenizer, beside that of peers."""

from __future__ import annotations

from collections.abc import Sequence

from cli.arguments import parse_command
from cli.entry import friendly_errors
from config.bench.training import BenchTokenizerConfig
from files.terminal_text import print_line

NAME = "diffusionlm-bench-tokenizer"


@friendly_errors(NAME)
def main(argv: Sequence[str] | None = None) -> None:
    config, _ = parse_command(
        BenchTokenizerConfig,
        name=NAME,
        description="Measure megabytes per CPU-second of training, encoding and decoding, round by round with peers.",
        example=f"  {NAME} --config config/resources/bench_tokenizer.toml --set output.directory=runs/bench_tokenizer",
        argv=argv,
    )
    # Only now, so that --help and config errors do not wait for what it needs.
    from benchmarking.bench_tokenizer import bench_tokenizer

    print_line(bench_tokenizer(config).to_markdown())


if __name__ == "__main__":
    main()
