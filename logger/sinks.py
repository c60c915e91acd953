"""The copies of a run's metrics that a config asks for, beside metrics.jsonl."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from config.logging import LoggingConfig, WandbConfig
from logger import tensorboard, weights_and_biases
from logger.background import BackgroundLogger, LogEvent
from logger.run_logger import RunLogger
from logger.tensorboard import TensorBoardLogger
from logger.weights_and_biases import WandbLogger, WandbRun, choose_mode, get_run_id, is_disabled, read_logged_samples


def open_sinks(
    config: LoggingConfig, directory: Path, step: int, values: Mapping[str, Any], log: LogEvent
) -> list[RunLogger]:
    """Weights & Biases and TensorBoard, each in a thread of its own. What is asked for and cannot be had is told; the
    run goes on without it.

    Args:
        config: the section.
        directory: of the run.
        step: that the run goes on from; 0: it begins.
        values: the whole config of the run, for people there.
        tell: says what goes wrong.
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
            seconds = 2 * wandb.timeout_seconds  # it may still be beginning
            start = _make_wandb_start(wandb, directory, step, values)
            sinks.append(BackgroundLogger("Weights & Biases", start, log, seconds))
        else:
            log(step, _missing_package_message("logging.wandb", "wandb"))
    return sinks


def _make_wandb_start(
    config: WandbConfig, directory: Path, step: int, values: Mapping[str, Any]
) -> Callable[[Callable[[str], None]], RunLogger]:
    samples = read_logged_samples(directory) if "samples" in config.artifacts else ()  # now: later ones come as events

    def start(log: Callable[[str], None]) -> RunLogger:
        mode, said = choose_mode(config)
        if said is not None:
            log(said)
        return WandbLogger(WandbRun(config, directory, mode, get_run_id(directory, step), values, samples), log)

    return start


def _missing_package_message(section: str, package: str) -> str:
    return (
        f"[{section}] is asked for, but the package {package} is not installed (uv sync --extra {package}); the run "
        "goes on, and metrics.jsonl has all"
    )
