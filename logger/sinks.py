"""Open the loggers of ``[logging]`` that copy a run's metrics to other services."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from config.training.logging import LoggingConfig, WandbConfig
from logger import tensorboard, weights_and_biases
from logger.background import BackgroundLogger, LogEvent
from logger.run_logger import RunLogger
from logger.tensorboard import TensorBoardLogger
from logger.weights_and_biases import WandbLogger, WandbRun, choose_mode, get_run_id, is_disabled, read_logged_samples


def open_sinks(
    config: LoggingConfig, directory: Path, step: int, values: Mapping[str, Any], log: LogEvent
) -> list[RunLogger]:
    """Open Weights & Biases and TensorBoard as configured, each in a thread of its own.

    A missing package is logged, and the run continues without that logger.

    Args:
        directory: directory of the run.
        step: step that the run resumes from; 0: it is new.
        values: resolved config of the run.
        log: logs errors.
    """
    sinks: list[RunLogger] = []
    if config.tensorboard.enabled:
        if tensorboard.is_installed():
            folder = directory / "tensorboard"
            sinks.append(BackgroundLogger("TensorBoard", lambda log: TensorBoardLogger(folder, step), log))
        else:
            log(step, _missing_package_message("logging.tensorboard", "tensorboard"))
    wandb = config.wandb
    if wandb is not None and not is_disabled(wandb):
        if weights_and_biases.is_installed():
            seconds = 2 * wandb.timeout_seconds  # at the end the start may still be pending
            start = _make_wandb_start(wandb, directory, step, values)
            sinks.append(BackgroundLogger("Weights & Biases", start, log, seconds))
        else:
            log(step, _missing_package_message("logging.wandb", "wandb"))
    return sinks


def _make_wandb_start(
    config: WandbConfig, directory: Path, step: int, values: Mapping[str, Any]
) -> Callable[[Callable[[str], None]], RunLogger]:
    # Read before the run logs its own samples, which come as events.
    samples = read_logged_samples(directory) if "samples" in config.artifacts else ()

    def start(log: Callable[[str], None]) -> RunLogger:
        mode, message = choose_mode(config)
        if message is not None:
            log(message)
        return WandbLogger(WandbRun(config, directory, mode, get_run_id(directory, step), values, samples), log)

    return start


def _missing_package_message(section: str, package: str) -> str:
    return (
        f"[{section}] needs the package {package}, which is not installed (uv sync --extra {package}); the run "
        "continues, and metrics.jsonl has all"
    )
