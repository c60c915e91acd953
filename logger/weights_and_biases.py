"""Weights & Biases: a copy of the metrics, the config, and files on request."""

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

from config.logging import WandbConfig
from logger.run_logger import Metrics, parse_record

RUN_ID_FILE = "wandb_run_id"
STEP_METRIC = "trainer/step"
"""Not the service's own step, which may never go back, and drops what comes with an earlier one: a run that resumes
does go back, to its last checkpoint."""

OFFLINE_NOTICE = (
    "the run is logged offline: `wandb sync` of the folder wandb/offline-run-* in the run directory sends it later"
)

CONNECT_SECONDS = 5.0

Mode = Literal["online", "offline"]

_MODES = {each: each for each in ("online", "offline", "disabled")} | {"run": "online", "dryrun": "offline"}
"""What WANDB_MODE may say, with the package's older words, and what it means."""


@dataclass(frozen=True)
class WandbRun:
    """What a run is called there."""

    config: WandbConfig
    directory: Path
    """Of the run."""
    mode: Mode
    run_id: str
    values: Mapping[str, Any]
    """The resolved config."""
    samples: tuple[tuple[int, str], ...] = ()
    """Step and text of those from before, where a run goes on: the table replaces the one that the service has."""

    def artifacts(self) -> list[tuple[str, str, Path]]:
        """Name, type and place of the files that are asked for and there."""
        places = {
            "checkpoints": ("model", self.directory / "checkpoints" / "latest"),
            "tokenizer": ("tokenizer", self.directory / "tokenizer"),
        }
        wanted = [(name, *places[name]) for name in self.config.artifacts if name in places]
        return [(name, kind, path.resolve()) for name, kind, path in wanted if path.exists()]


class WandbLogger:
    """A run of Weights & Biases. Its calls may raise anything and take long: keep it in a `BackgroundLogger`."""

    def __init__(self, run: WandbRun, log: Callable[[str], None]) -> None:
        """Begin it, or go on with the one of this id; offline where the service cannot be reached.

        Args:
            run: what it is called.
            say: for people.

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
        """A row of the history."""
        self._wandb.log({STEP_METRIC: step, **values})

    def event(self, step: int, kind: str, text: str, values: Metrics | None = None) -> None:
        """Samples are kept for the table at the end; the rest is for metrics.jsonl."""
        if kind == "sample" and "samples" in self._run.config.artifacts:
            self._samples.append((step, text))

    def progress(self, step: int, values: Metrics) -> None:
        """Nothing: progress is for people."""

    def close(self, exit_code: int = 0) -> None:
        """Upload what was asked for, and end the run with this code, whatever comes of the files."""
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
            console="off",  # standard output belongs to the run: it is neither copied nor written to
            quiet=True,
            init_timeout=config.timeout_seconds,
            finish_timeout=config.timeout_seconds,
        ),
    )


def is_installed() -> bool:
    """Whether the package is there; it is not imported, which takes seconds."""
    return importlib.util.find_spec("wandb") is not None


def is_disabled(config: WandbConfig) -> bool:
    """Whether nothing is to be done at all."""
    return _requested_mode(config) == "disabled"


def choose_mode(config: WandbConfig) -> tuple[Mode, str | None]:
    """How a run that is not disabled is logged, and what has to be said of it.

    Without a key the package would ask for one, or raise: so that is found out here.
    """
    wanted = _requested_mode(config)
    if wanted not in _MODES.values():
        return "offline", f"WANDB_MODE={wanted} is none of online, offline and disabled; {OFFLINE_NOTICE}"
    if wanted == "offline":
        return "offline", None
    if has_key():
        return "online", None
    return "offline", f"Weights & Biases: no key in WANDB_API_KEY or ~/.netrc; {OFFLINE_NOTICE}"


def _requested_mode(config: WandbConfig) -> str:
    if config.mode != "auto":
        return config.mode
    asked = os.environ.get("WANDB_MODE") or "online"
    return _MODES.get(asked, asked)


def has_key() -> bool:
    """Whether there is a key; it is not looked at."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = _service_url().hostname or ""
    named = os.environ.get("NETRC")
    for path in [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]:
        with contextlib.suppress(OSError, netrc.NetrcParseError, UnicodeDecodeError):
            if host in netrc.netrc(path).hosts:
                return True
    return False


def find_connection_problem() -> str | None:
    """Why nothing answers where the service is; None: something does, or a proxy is between, so that it is not known.

    The package itself would try for minutes, also when the process ends.
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
    """Step and text of each sample in a run's record."""
    record = directory / "metrics.jsonl"
    found = map(parse_record, record.read_bytes().split(b"\n") if record.is_file() else [])
    return tuple((each["step"], str(each.get("text", ""))) for each in found if each and each.get("event") == "sample")


def get_run_id(directory: Path, step: int) -> str:
    """The id of a run that goes on from a step, kept in its directory; of one that starts anew, a new one."""
    path = directory / RUN_ID_FILE
    if step and path.is_file():
        kept = path.read_text(encoding="utf-8").strip()
        if kept:
            return kept
    made = secrets.token_hex(4)
    path.write_text(f"{made}\n", encoding="utf-8")
    return made
