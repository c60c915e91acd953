"""The process of a stage: a command that ends with the process that started it.

Its standard input is a pipe that the pipeline holds open and never writes to: the end of the pipe is the end of the
pipeline, also by kill -9. Two processes of one stage would else write into one directory.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from cli.commands import COMMANDS


def main() -> int:
    """Run the command in the first argument with the other arguments. Returns its exit code."""
    threading.Thread(target=_end_with_pipeline, daemon=True).start()
    return COMMANDS[sys.argv[1]](sys.argv[2:])


def _end_with_pipeline() -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
