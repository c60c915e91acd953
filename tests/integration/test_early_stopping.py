"""Early stopping: the step at which a run ends, and that it has ended as after its last step."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from cli.train import format_summary
from config.train import TrainConfig
from diffusionlm.evaluation.validation import EvaluationResult, Validator
from diffusionlm.models.transformer import Transformer
from diffusionlm.training import loop
from diffusionlm.training.loop import train
from diffusionlm.training.run import Run
from files.json_files import read_json_object
from logger import RunLogger
from logger.pages.terminal import render_text
from logger.report import read_run
from tests.tiny_run import change_config, failing_at, read_events, read_losses

BOUNDS = {1: 5.0, 2: 4.0, 3: 3.95, 4: 4.2, 5: 3.0}
"""Step -> bound: that of step 3 is better by less than `min_delta`, so that with a patience of 2 step 4 is the last."""


@pytest.fixture
def stopping(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """A run whose validations give `BOUNDS`."""
    replaceable: Any = loop
    run_validation, evaluate, steps = replaceable.run_validation, Validator.evaluate_quick, [0]

    def validate(run: Run, logger: RunLogger) -> None:
        steps[0] = run.progress.step
        run_validation(run, logger)

    def evaluate_quick(self: Validator, model: Transformer) -> EvaluationResult:
        return replace(evaluate(self, model), nats_per_token=BOUNDS[steps[0]])

    monkeypatch.setattr(replaceable, "run_validation", validate)
    monkeypatch.setattr(Validator, "evaluate_quick", evaluate_quick)
    validation = {"every_steps": 1, "rows": 2, "early_stopping": {"patience": 2, "min_delta": 0.1}}
    return change_config(config, validation=validation, checkpoint={"every_steps": 100}, logging={"every_steps": 100})


def test_the_run_ends_as_after_its_last_step(stopping: TrainConfig, capfd: pytest.CaptureFixture[str]) -> None:
    result = train(stopping)
    assert result.step == 4 and result.summary is not None and result.summary.step == 4 and result.stop_signal is None
    checkpoints = stopping.run.directory / "checkpoints"
    assert checkpoints.joinpath("best").resolve().name == "step-00000002", "saved because it was the best"
    [event] = read_events(stopping, "early_stopping")
    assert event["text"] == (
        "stopped early after step 4: 2 validations did not improve on the 4.000 nats per token of step 2 by more than "
        f"0.1 (validation.early_stopping); the best checkpoint is {checkpoints / 'step-00000002'}"
    )
    assert read_run(stopping.run.directory).state == "complete"
    assert "4 of 8" in render_text(format_summary(stopping.run.directory), StringIO())
    losses = read_losses(stopping)
    assert len(losses) == 4, "a step that may be the last one is logged"
    assert train(stopping).summary == result.summary and read_losses(stopping) == losses, "it does not train on"
    assert "is complete: 2 validations did not improve on the 4.000 nats" in "".join(capfd.readouterr()), "and says why"
    (stopping.run.directory / "summary.json").unlink()  # as after a kill in the final evaluation
    assert train(stopping).summary is not None and read_losses(stopping) == losses


def test_a_killed_run_stops_at_the_same_step(stopping: TrainConfig, tmp_path: Path) -> None:
    train(stopping)
    killed = change_config(stopping, tmp_path / "killed", checkpoint={"every_steps": 3})
    with failing_at(3):
        train(killed)
    assert train(killed).step == 4 and read_losses(killed) == read_losses(stopping)
    states = [read_json_object(run.run.directory / "checkpoints/latest/state.json") for run in (stopping, killed)]
    expected = {"best_bound": 4.0, "best_step": 2, "num_worse": 2}
    assert [state["early_stopping"] for state in states] == [expected] * 2


@pytest.mark.parametrize("every_steps", [0, 8])
def test_a_run_without_validations_cannot_stop_early(config: TrainConfig, every_steps: int) -> None:
    validation: dict[str, Any] = {"every_steps": every_steps, "early_stopping": {}}
    with pytest.raises(ValueError, match=rf"early_stopping needs validations .*every_steps = {every_steps}: set it to"):
        change_config(config, validation=validation)
