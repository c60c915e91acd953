"""Around a run: what it was computed on, how it ended, and its ``report.html``."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch

from diffusionlm.training.run import Run
from logger import JsonLinesLogger, RunLogger
from logger.report import write_report

_ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def record_run_events(run: Run, logger: RunLogger) -> Iterator[None]:
    """Note the environment, and, whatever way the run ends, how it ended; then make its page.

    The logger may be closed when the run ends. A record or a page that cannot be written never ends a run, nor hides
    why it ended.
    """
    logger.event(run.progress.step, "environment", f"environment: {describe_environment(run)}")
    try:
        yield
    except BaseException as error:
        said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        _append_event(run, "failed", f"failed after step {run.progress.step}: {said}")
        raise
    else:
        if run.progress.step < run.max_steps:
            _append_event(run, "stopped", f"stopped after step {run.progress.step} and saved")
        elif not run.directory.summary.is_file():
            _append_event(
                run, "stopped", "stopped after the last step, which is saved, and before the final evaluation"
            )
    finally:
        _write_report_page(run)


def describe_environment(run: Run) -> str:
    """``name value; name value; ...``: software, device, ranks, the time in UTC and the commit, if it is known."""
    device = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else platform.machine()
    started = datetime.datetime.now(datetime.UTC)
    pieces = {
        "started": f"{started:%Y-%m-%d %H:%M} UTC",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": f"{run.device.type}, {device}",
        "threads": str(torch.get_num_threads()),
        "ranks": str(run.world.size),
        "precision": str(run.precision).removeprefix("torch."),
        "system": f"{platform.system()} {platform.release()}",
    }
    commit = describe_commit(_ROOT)
    if commit is not None:
        pieces["commit"] = commit
    return "; ".join(f"{name} {value}" for name, value in pieces.items())


def describe_commit(root: Path) -> str | None:
    """Of the checkout that the code is run from, with ``-dirty`` where files were changed; None: it is none."""
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, env=environment, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _append_event(run: Run, kind: str, text: str) -> None:
    """An event at the end of the record; not for people, who are told by the command."""
    if not run.world.is_first:
        return
    with contextlib.suppress(OSError, ValueError):
        record = JsonLinesLogger(run.directory.metrics, run.progress.step)
        record.event(run.progress.step, kind, text)
        record.close()


def _write_report_page(run: Run) -> None:
    if not run.world.is_first:
        return
    try:
        write_report([run.directory.path], run.directory.path / "report.html")
    except Exception as error:
        text = f"report.html could not be written: {type(error).__name__}: {error}"
        run.log(text)
        _append_event(run, "report", text)
