"""Log metrics, config and selected files to Weights & Biases."""

from __future__ import annotations

import contextlib
import importlib.util
import netrc
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

from config.training.logging import WandbConfig
from files.atomic import write_text_atomic
from logger.jsonl import parse_record
from logger.run_logger import Metrics, RunLogger

RUN_ID_FILE = "wandb_run_id"
STEP_METRIC = "trainer/step"
"""Metric used as the step. The service drops values whose own step goes back, as it does when a run resumes from a
checkpoint."""

OFFLINE_NOTICE = (
    "the run is logged offline: `wandb sync` of the folder wandb/offline-run-* in the run directory sends it later"
)

CONNECT_SECONDS = 5.0

Mode = Literal["online", "offline"]

_MODES = {mode: mode for mode in ("online", "offline", "disabled")} | {"run": "online", "dryrun": "offline"}
"""Values of WANDB_MODE, also the package's older ones, and the modes that they mean."""


@dataclass(frozen=True)
class WandbRun:
    """The settings of a Weights & Biases run."""

    config: WandbConfig
    directory: Path
    """Directory of the run."""
    mode: Mode
    run_id: str
    values: Mapping[str, Any]
    """The resolved config."""
    samples: tuple[tuple[int, str], ...] = ()
    """Step and text of samples from before a resume; the new table replaces the service's."""

    def artifacts(self) -> list[tuple[str, str, Path]]:
        """Return name, type and path of the configured artifacts that exist."""
        paths = {
            "checkpoints": ("model", self.directory / "checkpoints" / "latest"),
            "tokenizer": ("tokenizer", self.directory / "tokenizer"),
        }
        requested = [(name, *paths[name]) for name in self.config.artifacts if name in paths]
        return [(name, kind, path.resolve()) for name, kind, path in requested if path.exists()]


class WandbLogger(RunLogger):
    """Logs to Weights & Biases. Calls may raise anything and be slow: use it in a `BackgroundLogger`."""

    def __init__(self, run: WandbRun, log: Callable[[str], None]) -> None:
        """Start the run, or resume the one with this id; offline if the service cannot be reached.

        Args:
            log: prints a message.

        Raises:
            Exception: whatever the package raises.
        """
        self._run = run
        self._samples = list(run.samples)
        mode, problem = run.mode, find_connection_problem() if run.mode == "online" else None
        if problem is not None:
            mode = "offline"
            log(f"Weights & Biases: {problem}; {OFFLINE_NOTICE}")
        self._wandb = _start_wandb(run, mode)
        self._wandb.define_metric("*", step_metric=STEP_METRIC)

    def metrics(self, step: int, values: Metrics) -> None:
        self._wandb.log({STEP_METRIC: step, **values})

    def event(self, step: int, kind: str, text: str, values: Metrics | None = None) -> None:
        """Collect samples for the table at the end, if configured."""
        if kind == "sample" and "samples" in self._run.config.artifacts:
            self._samples.append((step, text))

    def close(self, exit_code: int = 0) -> None:
        """Upload the configured files, and finish with this code even if an upload fails."""
        try:
            if self._samples:
                import wandb

                rows = [list(sample) for sample in self._samples]
                self._wandb.log({"samples": wandb.Table(columns=["step", "text"], data=rows)})
            for name, kind, path in self._run.artifacts():
                self._wandb.log_artifact(str(path), name=f"{self._run.run_id}-{name}", type=kind)
        finally:
            self._wandb.finish(exit_code=exit_code)


def _start_wandb(run: WandbRun, mode: Mode) -> Any:
    import wandb

    config = run.config
    return wandb.init(
        project=config.project,
        entity=config.entity,
        name=config.name or run.directory.resolve().name,
        id=run.run_id,
        resume="allow",
        mode=mode,
        dir=str(run.directory),
        tags=list(config.tags),
        config=dict(run.values),
        settings=wandb.Settings(
            console="off",  # do not capture the run's standard output
            quiet=True,
            init_timeout=config.timeout_seconds,
            finish_timeout=config.timeout_seconds,
        ),
    )


def is_installed() -> bool:
    """Return whether the package is installed, without importing it, which takes seconds."""
    return importlib.util.find_spec("wandb") is not None


def is_disabled(config: WandbConfig) -> bool:
    """Return whether logging is disabled by the config or by WANDB_MODE."""
    return _requested_mode(config) == "disabled"


def choose_mode(config: WandbConfig) -> tuple[Mode, str | None]:
    """Return the mode of a run that is not disabled, and a message to print, if any.

    Without a key the package would prompt for one or raise, so the mode is offline then.
    """
    mode = _requested_mode(config)
    if mode not in _MODES.values():
        return "offline", f"WANDB_MODE={mode} is not online, offline or disabled; {OFFLINE_NOTICE}"
    if mode == "offline":
        return "offline", None
    if has_key():
        return "online", None
    return "offline", f"Weights & Biases: no key in WANDB_API_KEY or ~/.netrc; {OFFLINE_NOTICE}"


def _requested_mode(config: WandbConfig) -> str:
    if config.mode != "auto":
        return config.mode
    mode = os.environ.get("WANDB_MODE") or "online"
    return _MODES.get(mode, mode)


def has_key() -> bool:
    """Return whether a key is configured, in the environment or in a netrc file."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = _service_url().hostname or ""
    netrc_path = os.environ.get("NETRC")
    for path in [Path(netrc_path)] if netrc_path else [Path.home() / ".netrc", Path.home() / "_netrc"]:
        with contextlib.suppress(OSError, netrc.NetrcParseError, UnicodeDecodeError):
            if host in netrc.netrc(path).hosts:
                return True
    return False


def find_connection_problem() -> str | None:
    """Return why the service cannot be reached; None: it can, or a proxy is configured, which hides it.

    The package itself would retry for minutes, also when the process ends.
    """
    service = _service_url()
    host, port = service.hostname or "", service.port or (80 if service.scheme == "http" else 443)
    if service.scheme in getproxies() and not proxy_bypass(host):
        return None
    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except OSError as error:
        return f"{host}:{port} cannot be reached ({error})"
    return None


def _service_url() -> SplitResult:
    return urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai")


def read_logged_samples(directory: Path) -> tuple[tuple[int, str], ...]:
    """Return step and text of each sample in the run's ``metrics.jsonl``."""
    path = directory / "metrics.jsonl"
    records = map(parse_record, path.read_bytes().split(b"\n") if path.is_file() else [])
    return tuple(
        (record["step"], str(record.get("text", "")))
        for record in records
        if record and record.get("event") == "sample"
    )


def get_run_id(directory: Path, step: int) -> str:
    """Return the id in the run directory if the run resumes (``step`` > 0), else write a new one."""
    path = directory / RUN_ID_FILE
    if step and path.is_file():
        run_id = path.read_text(encoding="utf-8").strip()
        if run_id:
            return run_id
    run_id = secrets.token_hex(4)
    write_text_atomic(path, f"{run_id}\n")
    return run_id
