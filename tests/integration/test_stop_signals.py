"""Runs that a signal stops: they save, and the same command resumes them."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from cli.train import main
from config.train import TrainConfig
from diffusionlm.diffusion.objectives import DiffusionObjective
from diffusionlm.evaluation.validation import Validator
from diffusionlm.kernels.cross_entropy import LossInputs
from diffusionlm.training import loop, run_checkpoint
from diffusionlm.training.loop import train
from logger.report import read_run


def test_signal_finishes_the_step_saves_and_allows_resume(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_signal_after_the_save_of_a_step_ends_the_next_step(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the run says that it saved, and has not."""
    original, calls = run_checkpoint.log_failed_saves, [0]

    def log_failed_saves(*args: Any) -> None:
        original(*args)
        calls[0] += 1
        if calls[0] == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(loop, "log_failed_saves", log_failed_saves)
    ended = train(config)
    assert (ended.step, ended.stop_signal) == (4, signal.SIGINT)
    assert (config.run.directory / "checkpoints/latest").resolve().name == "step-00000004"


def test_the_exit_code_is_128_and_the_signal(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "train", lambda _: loop.TrainResult(3, None, signal.SIGUSR1))
    path = config.run.directory.parent / "train.toml"
    assert main(["--config", str(path)]) == 128 + signal.SIGUSR1


@pytest.mark.slow
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
