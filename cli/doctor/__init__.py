"""``diffusionlm-doctor``: report what is broken or slow on this machine. Works without torch."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from cli.doctor.report import examine, render
from cli.entry import build_parser, friendly_errors, path_argument
from files.terminal_text import print_line

NAME = "diffusionlm-doctor"

EXAMPLE = f"""  {NAME}
  {NAME} --quick --directory /scratch/runs
  {NAME} --json | jq '.findings[] | select(.weight == "slow")'"""

TRITON_TOLERANCE = 1e-4
"""Largest accepted difference between the losses of Triton and PyTorch, in nats."""


@friendly_errors(NAME)
def main(argv: Sequence[str] | None = None) -> int:
    """Print the report. Returns 1 if something is broken."""
    arguments = _parser().parse_args(argv)
    report = examine(arguments.directory, is_quick=arguments.quick, check_kernel=_check_kernel)
    if arguments.json:
        print(report.to_json())
    else:
        print_line(render(report, shutil.get_terminal_size((110, 24)).columns))
    return 1 if report.is_broken else 0


def _check_kernel() -> str:
    """Run the Triton kernel. Returns how it ran; raises ValueError if its losses are wrong."""
    # Imported here: without torch the doctor still runs and reports that it is missing.
    import torch

    from diffusionlm.kernels.triton_check import max_difference_to_eager

    difference = max_difference_to_eager()
    if not difference <= TRITON_TOLERANCE:
        raise ValueError(f"the losses of Triton and of PyTorch differ by {difference:.2g} nats")
    mode = "compiles" if torch.cuda.is_available() else "runs interpreted (it compiles only on a GPU)"
    return f"the cross-entropy kernel {mode}; it differs from PyTorch by {difference:.1g} nats"


def _parser() -> argparse.ArgumentParser:
    description = "Look at this machine: versions, GPU, cores, memory, disk, network; what is broken, what is slow."
    parser = build_parser(NAME, description, EXAMPLE)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--quick", action="store_true", help="measure nothing, and try no kernel")
    parser.add_argument(
        "--directory",
        metavar="DIR",
        type=path_argument,
        default=Path("runs"),
        help="where runs are written (default: runs)",
    )
    return parser
