"""What a run writes while it goes, and that no copy of it changes the run."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cli.train import train_as_rank
from config.generation import GenerationConfig
from config.train import TrainConfig
from diffusionlm.checkpoints.huggingface import load_model
from diffusionlm.checkpoints.model_files import load_tokenizer
from diffusionlm.inference.generate import infill
from diffusionlm.inference.healing import encode_pieces, split_infill
from diffusionlm.training.loop import train
from diffusionlm.training.metrics import StepMetrics
from diffusionlm.training.reporting import RunSummary, collect_monitor_metrics
from logger.report.reading import RENAMED_METRICS
from tests.tiny_run import change_config, read_events, read_records
from tests.unit.logger.test_weights_and_biases import make_package


def weights(config: TrainConfig) -> bytes:
    return (config.run.directory / "checkpoints/latest/model.safetensors").read_bytes()


def test_standard_output_has_the_metrics_alone(config: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    config = change_config(config, logging={"console": "json", "norms_every_steps": 4})
    assert train_as_rank(config) == 0
    out, err = capsys.readouterr()
    assert [json.loads(line) for line in out.splitlines()] == read_records(config, "metrics")
    assert "nats per token" in err and "next: uv run diffusionlm-infer" in err
    assert f"report: {config.run.directory / 'report.html'}\n" in err
    *steps, final = [record["metrics"] for record in read_records(config, "metrics")]
    assert len(steps) == 8
    summary_file = config.run.directory / "summary.json"
    summary_text = summary_file.read_text(encoding="utf-8")
    assert sum(step["step_seconds"] for step in steps) == pytest.approx(json.loads(summary_text)["seconds"])
    summary = json.loads(summary_text)["evaluation"]
    names = ("nats_per_token", "standard_error", "bits_per_byte", "bits_per_byte_standard_error")
    accuracies = {f"final_top1_accuracy/{fill['fraction']}": fill["top1_accuracy"] for fill in summary["fills"]}
    assert final == {f"final_{name}": summary[name] for name in names} | accuracies
    expected = RunSummary.read(summary_file)
    for former, name in RENAMED_METRICS.items():
        summary_text = summary_text.replace(name, former)
    summary_file.write_text(summary_text, encoding="utf-8")
    assert RunSummary.read(summary_file) == expected
    for step, values in enumerate(steps, 1):
        for key in (
            "loss",
            "lr",
            "lr/hidden",
            "grad_l2_norm",
            "tokens_per_second",
            "mask_ratio",
            "memory/peak_resident",
        ):
            assert isinstance(values[key], (int, float)), key
        assert values["grad_clip_ratio"] == pytest.approx(min(1.0, 1.0 / (values["grad_l2_norm"] + 1e-6)))
        assert any(key.startswith("loss_by_masked_fraction/") for key in values)
        has_norms = step % 4 == 0
        assert ("weight_norms/model.norm.weight" in values) is has_norms
        assert ("activation_norms/layers.0" in values) is has_norms


@pytest.mark.slow
def test_norm_interval_is_independent_and_does_not_change_training(config: TrainConfig, tmp_path: Path) -> None:
    plain = change_config(config, tmp_path / "plain", logging={"every_steps": 4})
    watched = change_config(config, tmp_path / "watched", logging={"every_steps": 4, "norms_every_steps": 3})
    train(plain)
    train(watched)
    assert [record["step"] for record in read_records(plain, "metrics")] == [4, 8, 8]
    assert [record["step"] for record in read_records(watched, "metrics")] == [3, 4, 6, 8, 8]
    assert weights(plain) == weights(watched)


@pytest.mark.slow
def test_weights_and_biases_never_touches_the_run(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", make_package("log"))
    copied = change_config(config, tmp_path / "copied", logging={"wandb": {"mode": "offline"}})
    assert train(copied).step == 8
    messages = [record["text"] for record in read_events(copied, "logging")]
    assert messages == [
        "Weights & Biases: RuntimeError: log failed; the run continues, and metrics.jsonl has all",
        "Weights & Biases failed 9 times; metrics.jsonl has all",
    ]
    train(config)
    assert weights(copied) == weights(config)


@pytest.mark.parametrize(("grad_norm", "ratio"), [(0.5, 1.0), (8.0, 0.25), (math.inf, math.nan), (math.nan, math.nan)])
def test_gradient_clip_ratio_is_recorded(grad_norm: float, ratio: float) -> None:
    settings = SimpleNamespace(max_grad_norm=2.0, device=torch.device("cpu"))
    run: Any = SimpleNamespace(settings=settings)
    values = collect_monitor_metrics(run, StepMetrics(1, *torch.tensor([2.0, grad_norm, 0.0, 1.0])))
    assert values["grad_clip_ratio"] == pytest.approx(ratio, rel=1e-5, nan_ok=True)
    assert values["memory/peak_resident"] > 2**20


def test_sample_event_has_step_map_and_logprobs(config: TrainConfig) -> None:
    config = change_config(config, samples={"every_steps": 8, "infills": ["the cat[MASK:2] sat"]})
    train(config)
    sample = read_events(config, "sample")[0]
    sample_values = sample["values"]
    assert sample["text"] == f"step 8: 'the cat[MASK:2] sat' -> {sample_values['filled']!r}"
    assert sample_values["given"] == "the cat[MASK:2] sat"
    tokenizer, model = load_tokenizer(config.run.directory), load_model(config.run.directory)
    canvas = list(encode_pieces(tokenizer, split_infill(sample_values["given"])).token_ids)
    [result] = infill(model, [canvas], GenerationConfig())
    assert "".join(sample_values["tokens"]) == sample_values["filled"] == tokenizer.decode(result.token_ids)
    first = canvas.index(model.config.required_mask_token_id)
    rest = [None] * (len(canvas) - first - 2)
    assert sample_values["step_map"] == [*[None] * first, *result.step_map, *rest] and sorted(result.step_map) == [1, 2]
    assert sample_values["logprobs"][first : first + 2] == pytest.approx(result.logprobs, abs=1e-6)
    assert sample_values["logprobs"][:first] == [None] * first and sample_values["logprobs"][first + 2 :] == rest
