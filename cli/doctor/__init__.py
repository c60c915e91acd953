"""``diffusionlm-doctor``: the machine, what is broken on it, and what will be slow. Works without torch."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from cli.doctor.report import examine, render
from files.resilient_stream import discard_pending_output

NAME = "diffusionlm-doctor"

EXAMPLE = f"""  {NAME}
  {NAME} --quick --directory /scratch/runs
  {NAME} --json | jq '.findings[] | select(.weight == "slow")'"""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, look, tell. Returns 1 where something is broken."""
    arguments = _parser().parse_args(argv)
    report = examine(arguments.directory, is_quick=arguments.quick, check_kernel=_check_kernel)
    text = report.to_json() if arguments.json else render(report, shutil.get_terminal_size((110, 24)).columns)
    try:
        print(text, flush=True)
    except BrokenPipeError:
        discard_pending_output(sys.stdout)  # whoever reads has enough
    return 1 if report.is_broken else 0


def _check_kernel() -> str:
    # Only now: a machine without torch is told so.
    from diffusionlm.kernels.triton_check import check_triton

    return check_triton()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=NAME,
        description="Look at this machine: versions, GPU, cores, memory, disk, network; what is broken, what is slow.",
        epilog=f"example:\n{EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--quick", action="store_true", help="measure nothing, and try no kernel")
    parser.add_argument(
        "--directory", metavar="DIR", type=Path, default=Path("runs"), help="where runs are written (default: runs)"
    )
    return parser
