"""Runs whose metrics are read late, with a profile and with other `[runtime]` switches."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch

from config.train import TrainConfig
from ddp.process_group import World
from diffusionlm.optim.build import Optimizers
from diffusionlm.training import loop
from diffusionlm.training.loop import train, train_remaining_steps
from diffusionlm.training.metrics import StepMetrics
from diffusionlm.training.run import Run
from diffusionlm.training.signals import StopRequest
from diffusionlm.training.step import load_step_batch, train_step
from logger import LoggerGroup
from logger.run_logger import Metrics
from tests.tiny_run import build_changed_run, change_config, failing_at, read_events, read_losses, scale_loss_weights

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Log(LoggerGroup):
    """Keeps events, and metrics but for durations and memory."""

    def __init__(self) -> None:
        self.events: list[tuple[int, str]] = []
        self.values: dict[int, dict[str, Any]] = {}

    def event(self, step: int, kind: str, text: str, values: Metrics | None = None) -> None:
        self.events.append((step, kind))

    def metrics(self, step: int, values: Any) -> None:
        measured = ("tokens_per_second", "_seconds", "seconds_left", "memory/peak_resident")
        self.values[step] = {key: value for key, value in values.items() if not key.endswith(measured)}

    def progress(self, step: int, values: Any) -> None:
        pass


def make_steps(run: Run, *, reads_each_step: bool = False) -> Log:
    """Make the steps; as on a GPU, metrics are read only when an action needs them."""
    run.settings = replace(run.settings, reads_metrics_each_step=reads_each_step)
    logger = Log()
    with StopRequest() as stop:
        train_remaining_steps(run, logger, stop)
    return logger


def test_a_logged_step_is_read_when_the_next_one_is_launched(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has work while the host logs; before a checkpoint and at the end all steps are read. The log is that
    of a run that reads each step at once."""
    calls: list[Any] = []
    original_update = loop.update_progress

    def launch(state: Any, loader: Any, batch: Any, *rest: Any) -> Any:
        calls.append(batch.step + 1)
        return train_step(state, loader, batch, *rest)

    def update(metrics: StepMetrics, *rest: Any) -> None:
        original_update(metrics, *rest)
        calls.append(f"read {metrics.step}")

    monkeypatch.setattr(loop, "train_step", launch)
    monkeypatch.setattr(loop, "update_progress", update)
    logs = []
    for name in ("late", "at once"):
        calls.clear()
        changes: Any = {"logging": {"every_steps": 2, "norms_every_steps": 4}, "checkpoint": {"every_steps": 6}}
        run = build_changed_run(config, tmp_path / name, **changes)
        logs.append(make_steps(run, reads_each_step=name == "at once").values)
        if name == "late":
            read = {step: f"read {step}" for step in range(1, 9)}
            expected = [1, 2, 3, read[1], read[2], 4, 5, read[3], read[4], 6, read[5], read[6], 7, 8, read[7], read[8]]
            assert calls == expected
    assert list(logs[0]) == list(logs[1]) == [2, 4, 6, 8]
    for step, values in logs[0].items():
        assert values == logs[1][step]
    assert logs[0][4].keys() > {"mask_ratio", "loss_smooth", "lr/embed", "weight_norms/mean", "activation_norms/norm"}


@pytest.mark.parametrize("can_skip", [True, False])
def test_next_batch_is_loaded_while_the_device_has_work(
    can_skip: bool, config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the update is launched; before it, where the host waits for the device to decide on the update."""
    run, calls = build_changed_run(config, tmp_path / "run"), []
    update, prefetch = run.state.optimizers.step, run.loader.prefetch
    monkeypatch.setattr(Optimizers, "can_skip_on_device", can_skip)

    def recorded(name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            calls.append(name)
            return function(*arguments)

        return call

    monkeypatch.setattr(run.state.optimizers, "step", recorded("update", update))
    monkeypatch.setattr(run.loader, "prefetch", recorded("prefetch", prefetch))
    with StopRequest() as stop:
        batch = load_step_batch(run.loader, 0, run.world, stop)
    with run.monitor.step(1):
        train_step(run.state, run.loader, batch, run.settings, run.monitor)
    assert calls == (["update", "prefetch"] if can_skip else ["prefetch", "update"])


def test_a_logged_step_is_not_lost_to_an_error_in_the_next(config: TrainConfig, tmp_path: Path) -> None:
    run = build_changed_run(config, tmp_path / "run", logging={"every_steps": 3}, checkpoint={"every_steps": 100})
    run.settings = replace(run.settings, reads_metrics_each_step=False)
    logger = Log()
    with StopRequest() as stop, failing_at(3):
        train_remaining_steps(run, logger, stop)
    assert list(logger.values) == [3]
    assert run.progress.step == 3


def test_delayed_skip_events_have_their_step_numbers(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build_changed_run(config, tmp_path / "late", logging={"every_steps": 4}, checkpoint={"every_steps": 100})
    scale_loss_weights(monkeypatch, {2: math.inf, 3: math.inf})
    logger = make_steps(run)
    assert [event for event in logger.events if event[1] == "skipped"] == [(2, "skipped"), (3, "skipped")]
    assert (run.progress.skipped, run.progress.skipped_in_a_row) == (2, 0)
    assert run.progress.step == 8


@pytest.mark.slow
def test_a_run_with_its_switches_and_a_profile(config: TrainConfig, tmp_path: Path) -> None:
    train(config)
    runtime = {"prefetch": False, "garbage_collection": 2}
    other = change_config(config, tmp_path / "other", runtime=runtime, profiler={"wait": 1, "warmup": 1, "active": 2})
    train(other)
    assert read_losses(other) == read_losses(config)
    file_names = {path.name for path in (tmp_path / "other" / "profile").iterdir()}
    assert file_names == {"trace-4.json", "table-4.txt"}
    table = (tmp_path / "other" / "profile" / "table-4.txt").read_text(encoding="utf-8")
    rows = {line.split()[0] for line in table.splitlines() if line.strip()}
    assert {"aten::mm", "forward", "backward", "optimizer", "data"} <= rows
    [event] = read_events(other, "profile")
    assert event["step"] == 4 and "table-4.txt has the table" in event["text"]


@pytest.mark.gpu
@pytest.mark.parametrize("compile", ["none", "blocks"])
def test_a_run_on_a_gpu_learns_as_on_a_cpu(config: TrainConfig, tmp_path: Path, compile: str) -> None:
    """With batches sent ahead, numbers read late and steps that the device would skip."""
    runs = [
        change_config(
            config,
            tmp_path / device,
            run={"device": device},
            optimizer={"kind": "adamw", "eps": 1e-4},
            runtime={"compile": compile if device == "cuda" else "none"},
        )
        for device in ("cpu", "cuda")
    ]
    for run in runs:
        train(run)
    assert read_losses(runs[1]) == pytest.approx(read_losses(runs[0]), rel=1e-3)


def test_all_parts_of_a_run_are_closed_although_one_fails(train_config: TrainConfig, tmp_path: Path) -> None:
    run, closed = build_changed_run(train_config, tmp_path / "run"), []
    logger = MagicMock()

    def fail() -> None:
        closed.append("checkpointer")
        raise RuntimeError("cannot be closed")

    with (
        StopRequest() as stop,
        patch.object(loop, "build_logger", lambda run: logger),
        patch.object(loop, "train_and_evaluate", lambda *_: None),
        patch.object(run.checkpointer, "close", fail),
        patch.object(run.loader, "close", lambda: closed.append("loader")),
        pytest.raises(RuntimeError, match="cannot be closed"),
    ):
        loop.run_to_end(run, stop)
    assert closed == ["checkpointer", "loader"]
    logger.close.assert_called_once_with(128)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_alone_is_profiled(
    rank: int, config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks would write the same files."""
    run = build_changed_run(config, tmp_path / "run", profiler={"active": 3})
    monkeypatch.setattr(Run, "world", World(rank, 2))
    assert loop.build_profiler(run, Log()).config.active == (3 if rank == 0 else 0)
