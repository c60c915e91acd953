"""TensorBoard's files, read back by its own reader."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from config.training.logging import LoggingConfig, TensorBoardConfig
from logger import open_sinks
from logger.tensorboard import TensorBoardLogger

pytest.importorskip("tensorboard")


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder))
    reader.Reload()
    return {tag: [(scalar.step, scalar.value) for scalar in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def test_numbers_come_back_and_a_resumed_run_replaces_them(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    for step in (1, 2, 3):
        logger.metrics(step, {"loss": 0.5 * step, "lr/hidden": 2, "gone": None, "bad": math.nan, "word": "x"})
    logger.event(3, "sample", "a <b>cat</b>")
    logger.close()
    expected = {"loss": [(1, 0.5), (2, 1.0), (3, 1.5)], "lr/hidden": [(1, 2.0), (2, 2.0), (3, 2.0)]}
    assert scalars(tmp_path) == expected
    again = TensorBoardLogger(tmp_path, resume_step=2)
    again.metrics(3, {"loss": 8.0})
    again.close()
    assert scalars(tmp_path)["loss"] == [(1, 0.5), (2, 1.0), (3, 8.0)]


def test_tensorboard_files_are_written_beside_the_run(tmp_path: Path) -> None:
    messages: list[str] = []
    assert open_sinks(LoggingConfig(), tmp_path, 0, {}, lambda at, text: messages.append(text)) == []
    config = LoggingConfig(tensorboard=TensorBoardConfig(enabled=True))
    (sink,) = open_sinks(config, tmp_path, 0, {}, lambda at, text: messages.append(text))
    sink.metrics(4, {"loss": 0.25})
    sink.close()
    assert scalars(tmp_path / "tensorboard") == {"loss": [(4, 0.25)]} and messages == []


def test_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    messages: list[str] = []
    config = LoggingConfig(tensorboard=TensorBoardConfig(enabled=True))
    assert open_sinks(config, tmp_path, 0, {}, lambda at, text: messages.append(text)) == []
    assert (
        len(messages) == 1 and "[logging.tensorboard]" in messages[0] and "uv sync --extra tensorboard" in messages[0]
    )


def test_a_run_that_begins_anew_in_its_folder_replaces_all(tmp_path: Path) -> None:
    """As after a kill before the first checkpoint."""
    for value, last in ((1.0, 5), (2.0, 3)):
        logger = TensorBoardLogger(tmp_path)
        for step in range(1, last + 1):
            logger.metrics(step, {"loss": value})
        logger.close()
    assert scalars(tmp_path) == {"loss": [(1, 2.0), (2, 2.0), (3, 2.0)]}
