"""Log metrics, config and selected files to Weights & Biases."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit

from config.base import NonEmptyStr, PositiveFloat, StrTuple, TupleOf
from files.atomic import write_text_atomic
from logger.jsonl import RecordReader
from logger.run_logger import Metrics, Sink, SinkOptions, SinkRun

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


class WandbConfig(SinkOptions):
    """A copy of the metrics at Weights & Biases, on if this table exists. Its errors are reported once and never end a
    run."""

    project: NonEmptyStr = "diffusionlm"
    """Project at Weights & Biases."""
    entity: NonEmptyStr | None = None
    """User or team. None: the default of the API key."""
    name: NonEmptyStr | None = None
    """Name of the run. None: the name of the run directory."""
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: WANDB_MODE if it is set, else online if there is an API key, else offline."""
    tags: StrTuple = ()
    """Tags of the run."""
    artifacts: TupleOf[Literal["checkpoints", "tokenizer", "samples"]] = ()
    """Uploads at the end: the newest checkpoint, the tokenizer, a table of the samples. A checkpoint temporarily needs
    its size once more on the disk."""
    timeout_seconds: PositiveFloat = 60.0
    """Timeout for starting the W&B run, and for the last uploads at its end. `wandb sync` uploads the rest."""

    @property
    def is_on(self) -> bool:
        return _requested_mode(self) != "disabled"

    @property
    def finish_seconds(self) -> float:
        return 2.0 * self.timeout_seconds  # at the end the start may still be pending


class WandbLogger(Sink[WandbConfig]):
    """Logs to Weights & Biases."""

    title, package = "Weights & Biases", "wandb"
    options = WandbConfig

    def __init__(self, options: WandbConfig, run: SinkRun, log: Callable[[str], None]) -> None:
        """Start the run, or resume the one with this id; offline if the service cannot be reached.

        Raises:
            Exception: whatever the package raises.
        """
        self._config, self._directory = options, run.directory
        self._samples = read_logged_samples(run) if "samples" in options.artifacts else []
        mode, message = choose_mode(options)
        if mode == "online" and (problem := find_connection_problem()) is not None:
            mode, message = "offline", f"Weights & Biases: {problem}; {OFFLINE_NOTICE}"
        if message is not None:
            log(message)
        self._run_id = get_run_id(run.directory, run.step)
        self._wandb = self._start(run, mode)
        self._wandb.define_metric("*", step_metric=STEP_METRIC)

    def _start(self, run: SinkRun, mode: Mode) -> Any:
        import wandb

        config = self._config
        return wandb.init(
            project=config.project,
            entity=config.entity,
            name=config.name or run.directory.resolve().name,
            id=self._run_id,
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

    def metrics(self, step: int, values: Metrics) -> None:
        self._wandb.log({STEP_METRIC: step, **values})

    def event(self, step: int, kind: str, text: str, values: Metrics | None = None) -> None:
        """Collect samples for the table at the end, if configured."""
        if kind == "sample" and "samples" in self._config.artifacts:
            self._samples.append((step, text))

    def close(self, exit_code: int = 0) -> None:
        """Upload the configured files, and finish with this code even if an upload fails."""
        try:
            if self._samples:
                import wandb

                rows = [list(sample) for sample in self._samples]
                self._wandb.log({"samples": wandb.Table(columns=["step", "text"], data=rows)})
            for name, kind, path in (
                ("checkpoints", "model", self._directory / "checkpoints" / "latest"),
                ("tokenizer", "tokenizer", self._directory / "tokenizer"),
            ):
                if name in self._config.artifacts and path.exists():
                    self._wandb.log_artifact(str(path.resolve()), name=f"{self._run_id}-{name}", type=kind)
        finally:
            self._wandb.finish(exit_code=exit_code)


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
    from requests.utils import get_netrc_auth  # a package that wandb needs

    variables = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
    return any(map(os.environ.get, variables)) or get_netrc_auth(_service_url().geturl()) is not None


def find_connection_problem() -> str | None:
    """Return why the service cannot be reached; None: it can, or a proxy is configured, which hides it.

    The package itself would retry for minutes, also when the process ends.
    """
    from urllib.request import getproxies, proxy_bypass  # the config imports this module, and must be quick

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


def read_logged_samples(run: SinkRun) -> list[tuple[int, str]]:
    """Return step and text of the samples from before a resume; the new table replaces the service's."""
    records = RecordReader(run.directory / "metrics.jsonl").read_new() if run.step else []
    samples = [record for record in records if record.get("event") == "sample" and record["step"] <= run.step]
    return [(record["step"], str(record.get("text", ""))) for record in samples]


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
