"""A run with a spike skips its step, records the batch and resumes bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from config.train import TrainConfig
from diffusionlm.diffusion.noised_batch import NoisedBatch
from diffusionlm.diffusion.objectives import DiffusionObjective
from diffusionlm.kernels.cross_entropy import LossInputs
from diffusionlm.training.loop import train
from diffusionlm.training.skipped_batches import SkippedBatches, load_skipped_step
from tests.tiny_run import change_config, read_events

WINDOW, DEVIATIONS = 8, 3.0


def test_a_run_skips_a_spike_records_it_and_resumes_exactly(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    original, broken = DiffusionObjective.build_loss_inputs, {6}

    def build_loss_inputs(self: DiffusionObjective, noised_batch: NoisedBatch, denominator: float) -> LossInputs:
        inputs = original(self, noised_batch, denominator)
        scale = 100.0 if calls.pop(0) in broken else 1.0
        return LossInputs(inputs.targets_N, inputs.weights_N * scale, inputs.excluded_token)

    monkeypatch.setattr(DiffusionObjective, "build_loss_inputs", build_loss_inputs)
    directories = [tmp_path / "whole", tmp_path / "parts"]
    spikes = {"max_spike_deviations": 30.0, "spike_window": 6}
    whole, parts = (change_config(config, directory, training=spikes) for directory in directories)
    calls = list(range(1, 9))
    train(whole)
    calls = [1, 2, 3, 4, 5, 5, 6, 7, 8]
    with monkeypatch.context() as patch:
        patch.setattr(SkippedBatches, "hold", _fail_at(5))
        with pytest.raises(KeyError):
            train(parts)  # the last checkpoint is that of step 4
    train(parts)
    assert calls == []
    skipped = []
    for directory in directories:
        skipped.append([event["text"].partition(";")[0] for event in read_events(directory, "skipped")])
        record, draws = load_skipped_step(directory / "skipped/step-00000006-rank-0.json")
        assert (record["reason"], len(draws)) == ("spike", 1)
    assert skipped[0] == skipped[1]
    assert [text[:16] for text in skipped[0]] == ["step 6: skipped,"]
    last = "checkpoints/latest/model.safetensors"
    assert (directories[0] / last).read_bytes() == (directories[1] / last).read_bytes()


def _fail_at(step: int) -> Any:
    original = SkippedBatches.hold

    def hold(self: SkippedBatches, number: int, draws: list[NoisedBatch], position: dict[str, Any]) -> None:
        if number == step:
            raise KeyError("the process is gone")
        original(self, number, draws, position)

    return hold
