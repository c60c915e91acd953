"""The loop in one process: what it does when steps or disks fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from config.train import TrainConfig
from diffusionlm.diffusion.objectives import DiffusionObjective
from diffusionlm.kernels.cross_entropy import LossInputs
from diffusionlm.training.checkpointing.staging import StagedCheckpoint
from diffusionlm.training.checkpointing.store import CheckpointStore
from diffusionlm.training.loop import train
from tests.tiny_run import change_config, read_records


def break_scores(monkeypatch: pytest.MonkeyPatch, bad_calls: set[int]) -> None:
    """Make the weights of some calls infinite, and so loss and gradient."""
    original, calls = DiffusionObjective.build_loss_inputs, [0]

    def build_loss_inputs(self: DiffusionObjective, noised_batch: Any, denominator: float) -> LossInputs:
        calls[0] += 1
        result = original(self, noised_batch, denominator)
        return LossInputs(result.targets_N, result.weights_N * (float("inf") if calls[0] in bad_calls else 1.0))

    monkeypatch.setattr(DiffusionObjective, "build_loss_inputs", build_loss_inputs)


def events(config: TrainConfig) -> list[dict[str, Any]]:
    return [record for record in read_records(config, "event") if record["event"] not in ("data", "environment")]


def test_nonfinite_step_is_skipped_and_recorded(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    break_scores(monkeypatch, {3})
    result = train(config)
    assert result.step == 8
    assert [(event["step"], event["event"]) for event in events(config)] == [(3, "skipped")]
    assert result.summary is not None
    assert result.summary.evaluation.nats_per_token < 10


def test_consecutive_nonfinite_steps_end_the_run_and_keep_the_checkpoint(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_scores(monkeypatch, set(range(4, 100)))
    with pytest.raises(ValueError, match=r"training\.max_nonfinite_steps"):
        train(config)
    assert CheckpointStore(config.run.directory / "checkpoints", 2).load_newest(print) is not None


def test_full_disk_is_reported_and_the_run_continues(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    original = CheckpointStore.save

    def save(self: CheckpointStore, checkpoint: StagedCheckpoint, *args: Any) -> Path:
        if checkpoint.step == 4:
            raise ValueError("step-4 was not written: No space left on device")
        return original(self, checkpoint, *args)

    monkeypatch.setattr(CheckpointStore, "save", save)
    assert train(config).step == 8
    assert [event["event"] for event in events(config)] == ["checkpoint"]


def test_a_full_disk_at_the_end_is_an_error(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(self: CheckpointStore, checkpoint: StagedCheckpoint, *args: Any) -> Path:
        raise ValueError("not written: No space left on device")

    monkeypatch.setattr(CheckpointStore, "save", save)
    with pytest.raises(ValueError, match="No space left"):
        train(config)


@pytest.mark.slow
def test_epochs_are_counted_in_rows(config: TrainConfig) -> None:
    training = config.training.model_copy(update={"max_steps": None, "epochs": 2, "batch_size": 16})
    result = train(config.model_copy(update={"training": training}))
    assert result.summary is not None
    state = json.loads((config.run.directory / "checkpoints/latest/state.json").read_text(encoding="utf-8"))
    # Whole batches of two epochs: the next one would reach into the third.
    assert state["loader"]["epoch"] in (1, 2)
    assert result.step == state["max_steps"]


def test_two_processes_do_not_share_a_directory(config: TrainConfig) -> None:
    from diffusionlm.training.checkpointing.run_directory import open_run_directory

    with (
        open_run_directory(config),
        pytest.raises(ValueError, match="in use by another process"),
        open_run_directory(config),
    ):
        pass


def test_a_directory_of_something_else_is_refused(config: TrainConfig) -> None:
    config.run.directory.mkdir()
    (config.run.directory / "thesis.tex").write_text("precious", encoding="utf-8")
    with pytest.raises(ValueError, match=r"not empty and not a run \(it holds thesis.tex\)"):
        train(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": {"infills": ["no hole [MASK:0]"]}}, r"samples\.infills = \['no hole \[MASK:0\]'\]: .*\[MASK:n\]"),
        ({"samples": {"infills": ["cat [MASK:40]"]}}, r"samples\.infills.*max_position_embeddings = 16: shorten"),
        (
            {"samples": {"infills": ["[MASK:2] cat"]}, "model": {"logit_alignment": "shifted"}},
            r"samples\.infills.*cannot predict the first token",
        ),
        (
            {"model": {"qk_norm": False, "layer_types": ["sliding_attention"], "sliding_window": 4}},
            r"layer_types.*sliding_attention.*qk_norm = true",
        ),
    ],
    ids=["no hole", "too long", "hole first", "no format"],
)
def test_late_failures_are_detected_at_startup(
    config: TrainConfig, changes: dict[str, dict[str, Any]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        train(change_config(config, None, **changes))
    assert not (config.run.directory / "metrics.jsonl").exists()
