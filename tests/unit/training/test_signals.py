"""Signals: remembered, agreed upon by ranks, and obeyed at once the second time."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from cli.train import main
from config.train import TrainConfig
from diffusionlm.diffusion.objectives import DiffusionObjective
from diffusionlm.evaluation.validation import Validator
from diffusionlm.kernels.cross_entropy import LossInputs
from diffusionlm.training import loop
from diffusionlm.training.loop import train
from diffusionlm.training.signals import HANDLED_SIGNALS, StoppedError, StopRequest
from logger.report import read_run


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_the_first_is_remembered_and_the_second_ends(number: int) -> None:
    before = [signal.getsignal(each) for each in HANDLED_SIGNALS]
    with StopRequest() as stop:
        assert (stop.signal, stop.received_signal) == (None, None)
        os.kill(os.getpid(), number)
        assert (stop.signal, stop.received_signal) == (number, number)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert [signal.getsignal(each) for each in HANDLED_SIGNALS] == before


def test_ranks_stop_together_for_what_one_received(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    told, other = StopRequest(is_distributed=True), StopRequest(is_distributed=True)
    other._handle_signal(signal.SIGUSR1, None)
    assert other.signal is None  # not before all know
    counts = [one + two for one, two in zip(told.flags(), other.flags(), strict=True)]
    for stop in (told, other):
        stop.stop_for_any_rank(counts)
    assert told.signal == other.signal == signal.SIGUSR1
    # What reaches this rank after the others have told it is its first; what comes at once behind it is its echo.
    told._handle_signal(signal.SIGUSR1, None)
    clock[0] += 0.9
    told._handle_signal(signal.SIGUSR1, None)
    clock[0] += 0.2
    with pytest.raises(KeyboardInterrupt):
        told._handle_signal(signal.SIGTERM, None)


def test_the_largest_of_different_signals_counts() -> None:
    stop = StopRequest(is_distributed=True)
    stop.stop_for_any_rank([0.0, 0.0, 0.0])
    assert stop.signal is None
    stop.stop_for_any_rank([1.0, 3.0, 0.0])
    assert stop.signal == signal.SIGUSR1 == max(signal.SIGINT, signal.SIGUSR1)
    stop.stop_for_any_rank([1.0, 3.0, 1.0])
    assert stop.signal == signal.SIGTERM
    assert sorted(HANDLED_SIGNALS) == list(HANDLED_SIGNALS)


def test_a_run_finishes_its_step_saves_and_goes_on_later(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = DiffusionObjective.build_loss_inputs, [0]

    def build_loss_inputs(self: DiffusionObjective, noised_batch: Any, denominator: float) -> LossInputs:
        calls[0] += 1
        if calls[0] == 3:
            os.kill(os.getpid(), signal.SIGUSR1)
        return original(self, noised_batch, denominator)

    monkeypatch.setattr(DiffusionObjective, "build_loss_inputs", build_loss_inputs)
    ended = train(config)
    assert (ended.step, ended.stop_signal, ended.summary) == (3, signal.SIGUSR1, None)
    assert (config.run.directory / "checkpoints/latest").resolve().name == "step-00000003"
    again = train(config)
    assert (again.step, again.stop_signal, calls[0]) == (8, None, 8)  # no step was made twice


def test_the_exit_code_is_128_and_the_signal(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "train", lambda _: loop.TrainResult(3, None, signal.SIGUSR1))
    path = config.run.directory.parent / "train.toml"
    assert main(["--config", str(path)]) == 128 + signal.SIGUSR1


def test_what_can_be_made_again_ends_at_the_first_signal() -> None:
    with StopRequest() as stop, pytest.raises(StoppedError), stop.interruptible():
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.signal == signal.SIGTERM
    with pytest.raises(StoppedError), stop.interruptible():
        raise AssertionError("it came before")
    shared = StopRequest(is_distributed=True)
    with shared.interruptible():
        shared._handle_signal(signal.SIGTERM, None)
    assert shared.received_signal == signal.SIGTERM, "no rank leaves the others alone"


def test_a_signal_in_the_final_evaluation_ends_it_and_the_command_makes_it_again(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def final(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("it goes on")

    with monkeypatch.context() as patch:
        patch.setattr(Validator, "final", final)
        ended = train(config)
    assert (ended.step, ended.stop_signal, ended.summary) == (8, signal.SIGTERM, None)
    assert "all steps are done and saved; the same command makes the final evaluation" in capsys.readouterr().err
    assert read_run(config.run.directory).state == "stopped"
    again = train(config)
    assert (again.step, again.stop_signal) == (8, None) and again.summary is not None
    assert read_run(config.run.directory).state == "complete"
