"""Record the environment of a run, how it ended, and its ``report.html``."""

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
    """Log the environment at the start. At the end append how the run ended to metrics.jsonl and write report.html.

    The logger may be closed inside. A failure to write is never raised, so it does not hide why the run ended.
    """
    logger.event(run.progress.step, "environment", f"environment: {describe_environment(run)}")
    try:
        yield
    except BaseException as error:
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        _append_event(run, "failed", f"failed after step {run.progress.step}: {reason}")
        raise
    else:
        if run.progress.step < run.settings.max_steps:
            _append_event(run, "stopped", f"stopped after step {run.progress.step} and saved")
        elif not run.directory.summary.is_file():
            text = "stopped after the last step, which is saved, and before the final evaluation"
            _append_event(run, "stopped", text)
    finally:
        _write_report_page(run)


def describe_environment(run: Run) -> str:
    """``name value; name value; ...``: start time in UTC, software, device, ranks, and the commit if there is one."""
    device = run.settings.device
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    started = datetime.datetime.now(datetime.UTC)
    values = {
        "started": f"{started:%Y-%m-%d %H:%M} UTC",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": f"{device.type}, {device_name}",
        "threads": str(torch.get_num_threads()),
        "ranks": str(run.world.size),
        "precision": str(run.settings.precision).removeprefix("torch."),
        "system": f"{platform.system()} {platform.release()}",
    }
    commit = describe_commit(_ROOT)
    if commit is not None:
        values["commit"] = commit
    return "; ".join(f"{name} {value}" for name, value in values.items())


def describe_commit(root: Path) -> str | None:
    """Commit of the checkout at ``root``, with ``-dirty`` if files were changed; None if there is no checkout."""
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=5, env=environment, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None


def _append_event(run: Run, kind: str, text: str) -> None:
    """Append an event to metrics.jsonl only: the command shows it to people by itself."""
    if not run.world.is_first:
        return
    with contextlib.suppress(OSError, ValueError):
        record = JsonLinesLogger(run.directory.metrics, run.progress.step)
        record.event(run.progress.step, kind, text)
        record.close()


def _write_report_page(run: Run) -> None:
    if not run.world.is_first:
        return
    page = run.directory.path / "report.html"
    try:
        write_report([run.directory.path], page)
    except Exception as error:
        text = f"report.html could not be written: {type(error).__name__}: {error}"
        run.log(text)
        _append_event(run, "report", text)
    else:
        run.log(f"report: {page}")
