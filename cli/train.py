"""``diffusionlm-train``: train a model as a TOML config says."""

from __future__ import annotations

import os
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from io import StringIO

from cli.arguments import friendly_errors, parse_command
from config.train import KEY_HINTS, TrainConfig
from files.resilient_stream import resilient

NAME = "diffusionlm-train"

RANK_ZERO_HEAD_START_SECONDS = 2.0
"""How long other ranks leave it to the first one to say what is wrong."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, load the config, train. Returns the exit code: 128 + signal where one ended the run.

    Under torchrun this is one rank of several: rank 0 says what is wrong with the command line, and a run that a signal
    ended after it saved is no failure, since torchrun would start it anew.
    """
    with redirect_stderr(sys.stderr if is_first_rank() else StringIO()):
        config, arguments = parse_command(
            TrainConfig,
            name=NAME,
            description="Train a masked diffusion language model.",
            example=f"{NAME} --config config/resources/train.toml --set training.max_steps=200",
            key_hints=KEY_HINTS,
            add_arguments=add_arguments,
            argv=argv,
        )
    if arguments.dry_run:
        from profiling.estimate import format_run_estimate

        if is_first_rank():
            print(format_run_estimate(config))
        return 0
    with friendly_errors(NAME if is_first_rank() else f"{NAME}, rank {os.environ['RANK']}"), _report_error_once():
        code = train_as_rank(config)
        return 0 if "TORCHELASTIC_RUN_ID" in os.environ else code
    return 1


def train_as_rank(config: TrainConfig) -> int:
    """Train, and return the exit code. What `diffusionlm-train-ddp` starts in each process.

    Whoever reads standard error may go away: that ends no run.
    """
    # Only now, so that --help and config errors do not wait for torch.
    from diffusionlm.training.loop import train

    with redirect_stderr(resilient(sys.stderr)):
        result = train(config)
    return 0 if result.stop_signal is None else 128 + result.stop_signal


@contextmanager
def _report_error_once() -> Iterator[None]:
    """Wait with an error of another rank than the first. If that one has it, too, torchrun ends this one now."""
    try:
        yield
    except (ValueError, OSError):
        if not is_first_rank():
            time.sleep(RANK_ZERO_HEAD_START_SECONDS)
        raise


def is_first_rank() -> bool:
    """Whether this process speaks for the run: there is no other, or torchrun made it the first."""
    return os.environ.get("RANK", "0") == "0"


def add_arguments(parser: ArgumentParser) -> None:
    """Those of both training commands."""
    parser.add_argument("--dry-run", action="store_true", help="show parameters, tokens, memory and FLOPs, and exit")


if __name__ == "__main__":
    sys.exit(main())
