"""Log metrics, config and selected files to Weights & Biases."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

from config.base import NonEmptyStr, PositiveFloat, TupleOf
from files.atomic import write_text_atomic
from logger.run_logger import Metrics, RunLogger, Sink, SinkRun

RUN_ID_FILE = "wandb_run_id"
STEP_METRIC = "trainer/step"
"""Metric used as the step. The service drops values whose own step goes back, as it does when a run resumes from a
checkpoint."""

OFFLINE_NOTICE = (
    "the run is logged offline: `wandb sync` of the folder wandb/offline-run-* in the run directory sends it later"
)


class WandbConfig(Sink):
    """A copy of the metrics at Weights & Biases, on if this table exists. Its errors are reported once and never end a
    run."""

    title: ClassVar[str] = "Weights & Biases"
    package: ClassVar[str | None] = "wandb"

    project: NonEmptyStr = "diffusionlm"
    """Project at Weights & Biases."""
    entity: NonEmptyStr | None = None
    """User or team. None: the default of the API key."""
    name: NonEmptyStr | None = None
    """Name of the run. None: the name of the run directory."""
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: WANDB_MODE if it is set, else online if there is an API key, else offline."""
    tags: TupleOf[str] = ()
    """Tags of the run."""
    artifacts: TupleOf[Literal["checkpoints", "tokenizer", "samples"]] = ()
    """Uploads: at the end the newest checkpoint and the tokenizer; each sample as a table. A checkpoint temporarily
    needs its size once more on the disk."""
    timeout_seconds: PositiveFloat = 60.0
    """Timeout for starting the W&B run, and for the last uploads at its end. `wandb sync` uploads the rest."""

    @property
    def is_on(self) -> bool:
        return _requested_mode(self) != "disabled"

    @property
    def finish_seconds(self) -> float:
        return 2.0 * self.timeout_seconds  # at the end the start may still be pending

    def open(self, run: SinkRun, log: Callable[[str], None]) -> RunLogger:
        return WandbLogger(self, run, log)


class WandbLogger(RunLogger):
    """Logs to Weights & Biases."""

    def __init__(self, options: WandbConfig, run: SinkRun, log: Callable[[str], None]) -> None:
        """Start the run, or resume the one with this id; offline if the service cannot be reached.

        Raises:
            Exception: whatever the package raises.
        """
        import wandb

        self._config, self._directory = options, run.directory
        mode = _requested_mode(options)
        if mode == "online" and (problem := find_login_problem()) is not None:
            log(f"Weights & Biases: {problem}; {OFFLINE_NOTICE}")
            mode = "offline"
        self._run_id = get_run_id(run.directory, run.step)
        self._wandb: Any = wandb.init(
            project=options.project,
            entity=options.entity,
            name=options.name or run.directory.resolve().name,
            id=self._run_id,
            resume="allow",
            mode=mode,  # type: ignore[arg-type]
            dir=str(run.directory),
            tags=list(options.tags),
            config=dict(run.values),
            settings=wandb.Settings(
                console="off",  # do not capture the run's standard output
                quiet=True,
                init_timeout=options.timeout_seconds,
                finish_timeout=options.timeout_seconds,
            ),
        )
        self._wandb.define_metric("*", step_metric=STEP_METRIC)

    def metrics(self, step: int, values: Metrics) -> None:
        self._wandb.log({STEP_METRIC: step, **values})

    def event(self, step: int, kind: str, text: str, values: Metrics | None = None) -> None:
        """Log a sample, if configured."""
        if kind == "sample" and "samples" in self._config.artifacts:
            import wandb

            table = wandb.Table(columns=["step", "text"], data=[[step, text]])
            self._wandb.log({STEP_METRIC: step, "samples": table})

    def close(self, exit_code: int = 0) -> None:
        """Upload the configured files, and finish with this code even if an upload fails."""
        try:
            for name, kind, path in (
                ("checkpoints", "model", self._directory / "checkpoints" / "latest"),
                ("tokenizer", "tokenizer", self._directory / "tokenizer"),
            ):
                if name in self._config.artifacts and path.exists():
                    self._wandb.log_artifact(str(path.resolve()), name=f"{self._run_id}-{name}", type=kind)
        finally:
            self._wandb.finish(exit_code=exit_code)


def _requested_mode(config: WandbConfig) -> str:
    return config.mode if config.mode != "auto" else os.environ.get("WANDB_MODE") or "online"


def find_login_problem() -> str | None:
    """Return why the service cannot be used: no key, a wrong one, or no connection. None: it can.

    `wandb.init` itself would prompt for a key, and retry a connection for minutes.
    """
    import wandb

    try:
        has_key = wandb.login(prompt=False)
    except Exception as error:
        return str(error)
    return None if has_key else "no key in WANDB_API_KEY or ~/.netrc"


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
