"""``python -m tests.e2e.gated_train cli.train ...``: a training command that stops at a gate until it gets a signal.

After the step GATE_STEP its first rank creates the file GATE and waits; if the file exists, it does not wait. The ranks
that ``cli.train_ddp`` starts import this module as well.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
from pathlib import Path

from diffusionlm.training import loop

MAX_WAIT_SECONDS = 600.0
"""A test that has ended sends no signal."""

collect_garbage = loop.collect_garbage


def wait_after_step(step: int, every_steps: int) -> None:
    collect_garbage(step, every_steps)
    gate, is_first = Path(os.environ["GATE"]), os.environ.get("RANK", "0") == "0"
    if step != int(os.environ["GATE_STEP"]) or not is_first or gate.exists():
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    previous = signal.set_wakeup_fd(writer)  # a byte for each signal that has a handler
    gate.touch()
    assert select.select([reader], [], [], MAX_WAIT_SECONDS)[0], "no signal came"
    signal.set_wakeup_fd(previous)


loop.collect_garbage = wait_after_step

if __name__ == "__main__":
    sys.exit(importlib.import_module(sys.argv.pop(1)).main())
