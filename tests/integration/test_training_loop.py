"""The loop in one process: steps or disks that fail, directories and resumed runs that do not fit."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from config.train import TrainConfig
from diffusionlm.training.checkpointing import staging
from diffusionlm.training.checkpointing.staging import StagedCheckpoint
from diffusionlm.training.checkpointing.store import CheckpointStore
from diffusionlm.training.loop import train
from diffusionlm.training.skipped_batches import load_skipped_step
from tests.tiny_run import change_config, failing_at, read_events, scale_loss_weights
from tokenizer import save_tokenizer, train_bpe


def test_nonfinite_step_is_skipped_and_recorded(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    scale_loss_weights(monkeypatch, {3: math.inf})
    result = train(config)
    assert result.step == 8
    assert [event["step"] for event in read_events(config, "skipped")] == [3]
    assert result.summary is not None
    assert result.summary.evaluation.nats_per_token < 10


def test_consecutive_nonfinite_steps_end_the_run_and_keep_the_checkpoint(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale_loss_weights(monkeypatch, dict.fromkeys(range(4, 100), math.inf))
    with pytest.raises(ValueError, match=r"training\.max_nonfinite_steps"):
        train(config)
    assert CheckpointStore(config.run.directory / "checkpoints", 2).load_newest(print) is not None


def test_a_run_skips_a_spike_records_it_and_resumes_exactly(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    directories = [tmp_path / "whole", tmp_path / "parts"]
    spikes = {"max_spike_deviations": 30.0, "spike_window": 6}
    whole, parts = (change_config(config, directory, training=spikes) for directory in directories)
    calls = scale_loss_weights(monkeypatch, {6: 100.0, 14: 100.0})  # step 6 of both
    train(whole)
    with failing_at(4):
        train(parts)
    train(parts)
    assert len(calls) == 16
    skipped = []
    for directory in directories:
        skipped.append([event["text"].partition(";")[0] for event in read_events(directory, "skipped")])
        record, draws = load_skipped_step(directory / "skipped/step-00000006-rank-0.json")
        assert (record["reason"], len(draws)) == ("spike", 1)
    assert skipped[0] == skipped[1]
    assert [text[:16] for text in skipped[0]] == ["step 6: skipped,"]
    last = "checkpoints/latest/model.safetensors"
    assert (directories[0] / last).read_bytes() == (directories[1] / last).read_bytes()


def test_full_disk_is_reported_and_the_run_continues(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    original = CheckpointStore.save

    def save(self: CheckpointStore, checkpoint: StagedCheckpoint, *args: Any) -> Path:
        if checkpoint.step == 4:
            raise ValueError("step-4 was not written: No space left on device")
        return original(self, checkpoint, *args)

    monkeypatch.setattr(CheckpointStore, "save", save)
    assert train(config).step == 8
    assert len(read_events(config, "checkpoint")) == 1


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


@pytest.fixture
def older_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints store a former key of the loader's state."""
    stage = staging.stage_checkpoint

    def stage_older(step: int, write_model: Any, state: dict[str, Any], *arguments: Any) -> Any:
        loader = {"places" if key == "num_positions" else key: value for key, value in state["loader"].items()}
        return stage(step, write_model, state | {"loader": loader}, *arguments)

    monkeypatch.setattr("diffusionlm.training.run_checkpoint.stage_checkpoint", stage_older)


@pytest.mark.usefixtures("older_state")
def test_other_data_and_another_tokenizer_are_refused(config: TrainConfig) -> None:
    short = config.model_copy(update={"training": config.training.model_copy(update={"max_steps": 2})})
    train(short)
    backup, tokenizer = config.run.directory / "kept", config.run.directory / "tokenizer"
    tokenizer.rename(backup)
    save_tokenizer(train_bpe(["other text"], vocab_size=260), tokenizer)
    with pytest.raises(ValueError, match=r"step-00000002 was made .*tokenizer_fingerprint: \w+ -> \w+"):
        train(short)
    shutil.rmtree(tokenizer)
    backup.rename(tokenizer)
    text = config.run.directory.parent / "a.txt"
    text.write_text(text.read_text(encoding="utf-8") + "\n\nand one more", encoding="utf-8")
    with pytest.raises(ValueError, match=r"data_identity: .*checkpoint\.config_change = .accept"):
        train(short)
    accepting = config.checkpoint.model_copy(update={"config_change": "accept"})
    assert train(short.model_copy(update={"checkpoint": accepting})).step == 2
