"""TensorBoard's files, read back by its own reader."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from logger.run_logger import SinkRun
from logger.tensorboard import TensorBoardLogger

pytest.importorskip("tensorboard")


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder / "tensorboard"))
    reader.Reload()
    return {tag: [(scalar.step, scalar.value) for scalar in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def open_logger(folder: Path, step: int = 0) -> TensorBoardLogger:
    return TensorBoardLogger(SinkRun(folder, step, {}))


def test_numbers_come_back_and_a_resumed_run_replaces_them(tmp_path: Path) -> None:
    logger = open_logger(tmp_path)
    for step in (1, 2, 3):
        logger.metrics(step, {"loss": 0.5 * step, "lr/hidden": 2, "gone": None, "bad": math.nan, "word": "x"})
    logger.event(3, "sample", "a <b>cat</b>")
    logger.close()
    expected = {"loss": [(1, 0.5), (2, 1.0), (3, 1.5)], "lr/hidden": [(1, 2.0), (2, 2.0), (3, 2.0)]}
    assert scalars(tmp_path) == expected
    again = open_logger(tmp_path, 2)
    again.metrics(3, {"loss": 8.0})
    again.close()
    assert scalars(tmp_path)["loss"] == [(1, 0.5), (2, 1.0), (3, 8.0)]
