"""``python -m profiling.roofline.decoding``: predict the time of decoding on a GPU that is not there."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from cli.arguments import parse_command
from cli.entry import friendly_errors, path_argument, usage_errors
from config.bench.inference import BenchInferConfig
from files.atomic import write_text_atomic
from files.terminal_text import print_line

NAME = "python -m profiling.roofline.decoding"


@friendly_errors(NAME)
def main(argv: Sequence[str] | None = None) -> None:
    config, arguments = parse_command(
        BenchInferConfig,
        name=NAME,
        description="Predict the time of decoding from FLOPs, bytes and launches of each round.",
        example=f"  {NAME} --config config/resources/bench_infer_gpu.toml --device h200",
        add_arguments=_add_arguments,
        argv=argv,
    )
    with usage_errors(NAME):
        _check_model(config)
    # Only now, so that --help and config errors do not wait for torch.
    from profiling.roofline.round_predictions import predict_decoding

    with usage_errors(NAME):
        text = predict_decoding(config, arguments.device).to_markdown()
    print_line(text)
    if arguments.output is not None:
        write_text_atomic(arguments.output, f"# Predicted decoding\n\n{text}\n")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", choices=("h100", "h200", "b200"), default="h200", help="of the table by part (default: h200)"
    )
    parser.add_argument("--output", metavar="FILE.md", type=path_argument, help="Markdown file that gets the tables")


def _check_model(config: BenchInferConfig) -> None:
    """Check that the model is a shape in bfloat16.

    Raises:
        ValueError: it is a directory, or float32.
    """
    model = config.model
    if model.path is not None:
        raise ValueError(f"model.path = {str(model.path)!r}: only shapes are predicted; set [model.shape] in its place")
    if model.dtype not in ("auto", "bfloat16"):
        raise ValueError(
            f'model.dtype = "{model.dtype}": peaks of GPUs are known for bfloat16 alone; add --set model.dtype=bfloat16'
        )


if __name__ == "__main__":
    main()
