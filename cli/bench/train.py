"""``diffusionlm-bench-train``: training speed and memory, beside those of peers."""

from __future__ import annotations

from collections.abc import Sequence

from cli.arguments import parse_command
from cli.entry import friendly_errors
from config.bench.training import BenchTrainConfig
from files.terminal_text import print_line

NAME = "diffusionlm-bench-train"


@friendly_errors(NAME)
def main(argv: Sequence[str] | None = None) -> None:
    config, _ = parse_command(
        BenchTrainConfig,
        name=NAME,
        description="Measure training tokens per second and memory, in turn with peers.",
        example=f"  {NAME} --config config/resources/bench_train.toml --set output.directory=runs/bench_train",
        argv=argv,
    )
    # Only now, so that --help and config errors do not wait for torch.
    from benchmarking.bench_train import bench_train

    print_line(bench_train(config).to_markdown())


if __name__ == "__main__":
    main()
