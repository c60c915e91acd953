"""``python -m profiling.roofline``: predict the time of training steps, on a GPU that is not there or on this CPU."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from cli.arguments import parse_command
from cli.entry import exit_with_usage_error, friendly_errors, path_argument, usage_errors
from config.bench.training import BenchTrainConfig
from config.training.optimizer import AdamWConfig, MuonConfig
from config.training.runtime import RuntimeConfig
from files.atomic import write_text_atomic
from files.terminal_text import print_line

NAME = "python -m profiling.roofline"
DEVICES = ("h100", "h200", "b200", "cpu")
OPTIMIZERS = {"adamw": AdamWConfig, "muon": MuonConfig}


@friendly_errors(NAME)
def main(argv: Sequence[str] | None = None) -> None:
    config, arguments = parse_command(
        BenchTrainConfig,
        name=NAME,
        description="Predict the time of training steps from their FLOPs, bytes and launches.",
        example=f"  {NAME} --config config/resources/bench_train_gpu.toml --device h200\n"
        f"  {NAME} --config config/resources/bench_train.toml --device cpu",
        add_arguments=_add_arguments,
        argv=argv,
    )
    runtime = RuntimeConfig(compile=arguments.compile, activation_checkpointing=arguments.checkpointing)
    is_default = runtime == RuntimeConfig() and arguments.optimizer == "adamw" and not arguments.ema
    is_default = is_default and arguments.attention_share is None
    if arguments.device == "cpu" and not is_default:
        exit_with_usage_error(
            NAME,
            "--device cpu measures the steps of diffusionlm-bench-train: remove --compile, --checkpointing, "
            "--optimizer, --ema and --attention-share",
        )
    # Only now, so that --help and config errors do not wait for torch.
    from profiling.roofline.predictions import StepOptions, predict
    from profiling.roofline.validation import validate

    with usage_errors(NAME):
        if arguments.device == "cpu":
            report = validate(config)
        else:
            options = StepOptions(runtime, OPTIMIZERS[arguments.optimizer](), arguments.ema)
            if arguments.attention_share is not None:
                options = replace(options, attention_share=arguments.attention_share)
            report = predict(config, arguments.device, options)
    text = report.to_markdown()
    print_line(text)
    if arguments.output is not None:
        write_text_atomic(arguments.output, _format_page(arguments.device, text))


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default="h200",
        help="GPU of the tables by part (default: h200); cpu: measure this CPU, predict and measure steps on it",
    )
    parser.add_argument("--compile", choices=("auto", "none"), default="auto", help="of the blocks (default: auto)")
    parser.add_argument(
        "--checkpointing", choices=("none", "full"), default="none", help="of activations (default: none)"
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="default: adamw")
    parser.add_argument("--ema", action="store_true", help="average the weights")
    parser.add_argument(
        "--attention-share",
        metavar="SHARE",
        type=_share_argument,
        help="share of a GPU's peak that fused attention is assumed to reach, such as 0.4 (default: 0.3)",
    )
    parser.add_argument("--output", metavar="FILE.md", type=path_argument, help="Markdown file that gets the tables")


def _share_argument(text: str) -> float:
    """A share of a peak.

    Raises:
        argparse.ArgumentTypeError: not a number, or not above 0 and at most 1.
    """
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0.0 < share <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is no share: give a number above 0 and at most 1, such as 0.4")
    return share


def _format_page(device: str, text: str) -> str:
    title = "Predicted training steps" if device != "cpu" else "Predicted against measured training steps on a CPU"
    return f"# {title}\n\n{text}\n"


if __name__ == "__main__":
    main()
