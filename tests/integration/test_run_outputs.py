"""What a run writes for people: logs, events, its page and the cards of its checkpoints. No copy changes the run."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from cli.train import train_as_rank
from config.generation import GenerationConfig
from config.train import TrainConfig
from diffusionlm.checkpoints.huggingface import load_model
from diffusionlm.checkpoints.manifest import verify_directory
from diffusionlm.checkpoints.model_files import load_tokenizer
from diffusionlm.inference.generate import infill
from diffusionlm.inference.healing import encode_pieces, split_infill
from diffusionlm.training.loop import train, train_remaining_steps
from diffusionlm.training.metrics import StepMetrics
from diffusionlm.training.reporting import RunSummary, collect_monitor_metrics, describe_commit
from diffusionlm.training.run_checkpoint import resume_run
from diffusionlm.training.signals import StopRequest
from logger import LoggerGroup
from logger.report import read_run
from logger.report.reading import RENAMED_METRICS
from tests.tiny_run import build_changed_run, change_config, read_events, read_records
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


def test_run_records_its_environment_and_writes_a_report(config: TrainConfig) -> None:
    train(config)
    page = (config.run.directory / "report.html").read_text(encoding="utf-8")
    assert "<li>complete, 8 of 8 steps</li>" in page
    [environment] = read_events(config, "environment")
    pieces = dict(piece.split(" ", 1) for piece in environment["text"].removeprefix("environment: ").split("; "))
    assert {"started", "python", "torch", "device", "threads", "ranks", "precision", "system"} <= pieces.keys()
    assert (pieces["threads"], pieces["ranks"], pieces["precision"]) == ("1", "1", "float32")
    assert read_run(config.run.directory).state == "complete"


def test_failure_is_recorded_and_in_the_report(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "diffusionlm.training.loop.train_remaining_steps", Mock(side_effect=ValueError("the disk is <full>"))
    )
    with pytest.raises(ValueError, match="the disk is <full>"):
        train(config)
    [event] = read_events(config, "failed")
    assert (event["step"], event["text"]) == (0, "failed after step 0: the disk is <full>")
    page = (config.run.directory / "report.html").read_text(encoding="utf-8")
    assert "<li>failed, 0 of 8 steps</li>" in page and "the disk is &lt;full&gt;" in page


@pytest.mark.slow
def test_extended_run_has_no_results_until_it_ends_again(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(config).summary is not None
    longer = config.model_copy(
        update={
            "training": config.training.model_copy(update={"max_steps": 10}),
            "checkpoint": config.checkpoint.model_copy(update={"config_change": "accept"}),
        }
    )
    with monkeypatch.context() as patch:
        patch.setattr("diffusionlm.training.loop.train_step", Mock(side_effect=ValueError("no more")))
        with pytest.raises(ValueError, match="no more"):
            train(longer)
    run = read_run(config.run.directory)
    assert (run.summary, run.state) == ({}, "failed")
    ended = train(longer)
    assert ended.summary is not None and ended.summary.step == 10
    assert read_run(config.run.directory).result("step") == 10


@pytest.mark.slow
def test_a_damaged_summary_is_named_with_the_remedy(config: TrainConfig) -> None:
    train(config)
    summary = config.run.directory / "summary.json"
    summary.write_text('{"step": 8', encoding="utf-8")
    with pytest.raises(ValueError, match=r"summary\.json cannot be read .*: remove it, and the same command"):
        train(config)
    summary.unlink()
    assert train(config).summary is not None


def test_closed_stderr_does_not_end_training(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        assert train_as_rank(config) == 0
    assert read_run(config.run.directory).state == "complete"


def test_a_page_that_cannot_be_written_is_an_event_and_not_the_end(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = OSError(28, "No space left on device")
    monkeypatch.setattr("diffusionlm.training.reporting.write_report", Mock(side_effect=error))
    config = config.model_copy(update={"training": config.training.model_copy(update={"max_steps": 2})})
    assert train(config).summary is not None
    text = "report.html could not be written: OSError: [Errno 28] No space left on device"
    [event] = read_events(config, "report")
    assert (event["step"], event["text"]) == (2, text)
    assert text in capsys.readouterr().err


def test_the_commit_of_a_checkout(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q")
    assert describe_commit(tmp_path) is None, "there is no commit yet"
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-qm", "first")
    assert describe_commit(tmp_path) == git("rev-parse", "--short=12", "HEAD")
    (tmp_path / "file").write_text("2")
    assert describe_commit(tmp_path) == git("rev-parse", "--short=12", "HEAD") + "-dirty"
    (tmp_path / "inside").mkdir()
    assert describe_commit(tmp_path / "inside") is None, "the checkout around it is another project"


def card_of(folder: Path) -> str:
    return (folder / "README.md").read_text(encoding="utf-8")


def test_model_cards_have_the_last_validation(config: TrainConfig) -> None:
    config = change_config(config, validation={"every_steps": 6, "rows": 8}, checkpoint={"keep_last": 3})
    result = train(config)
    assert result.summary is not None
    store = config.run.directory / "checkpoints"
    assert sorted(path.name for path in store.glob("step-*")) == ["step-00000004", "step-00000006", "step-00000008"]
    assert "| validation | unknown |" in card_of(store / "step-00000004")
    metrics = next(record["metrics"] for record in read_records(config) if "val_nats_per_token" in record["metrics"])
    assert (
        f"| validation | at most {metrics['val_nats_per_token']:.3f} ± {metrics['val_standard_error']:.3f} nats per "
        "token, at step 6 |"
    ) in card_of(store / "step-00000006")
    final, last = result.summary.evaluation, store / "step-00000008"
    bound = f"at most {final.nats_per_token:.3f} ± {final.standard_error:.3f} nats per token, at step 8"
    assert f"| validation | {bound} |" in card_of(last)
    verify_directory(last, must_have_manifest=True)
    state = json.loads((last / "state.json").read_text())
    for part in (
        "# run, 6,192 parameters",
        "| steps | 8 of 8, with 4 sequences of up to 16 tokens |",
        f"| tokens seen | {state['progress']['tokens_seen']:,} |",
        f"| tokenizer | {state['tokenizer_fingerprint']} |",
        f"| {state['data_identity']} | 100.0% |",
    ):
        assert part in card_of(last), part
    objective = card_of(last).split("```toml\n")[1].split("```")[0]
    assert tomllib.loads(objective)["kind"] == "masked_diffusion"


@pytest.mark.slow
def test_model_cards_name_no_folder_of_the_machine(config: TrainConfig, tmp_path: Path) -> None:
    """Of neither the data nor the model that training starts from; the identity of the data stays the same."""
    start = config.run.directory.with_name("start")
    train(change_config(config, start))
    dataset = tmp_path / "stories"
    dataset.mkdir()
    (dataset / "train-0.jsonl").write_text("".join(json.dumps({"text": f"some words {i}"}) + "\n" for i in range(99)))
    values = config.model_dump(exclude_unset=True)
    values["model"] = {"init_from": start}
    values["tokenizer"] = {}
    values["data"]["source"] = {"kind": "hub", "dataset": str(dataset), "validation_fraction": 0.2}
    config = TrainConfig.model_validate(values)
    train(config)
    for directory, parts in ((start, ["a.txt |"]), (config.run.directory, ["| started from | start |", "| stories, "])):
        checkpoint = directory / "checkpoints/latest"
        card = card_of(checkpoint)
        assert str(tmp_path) not in card and not re.search(r"(?<![\w.:])/\w", card)
        assert all(part in card for part in parts)
    assert (
        "datasets:" not in card
        and f"hub/{dataset}/" in json.loads((checkpoint / "state.json").read_text())["data_identity"]
    )


@pytest.mark.slow
def test_resumed_run_restores_the_last_validation(config: TrainConfig) -> None:
    """The one of step 2, at step 3."""
    sections: dict[str, Any] = {"validation": {"every_steps": 2, "rows": 8}, "checkpoint": {"every_steps": 1}}
    run, resumed = (build_changed_run(config, config.run.directory, **sections) for _ in range(2))
    run.settings = replace(run.settings, max_steps=3)
    with StopRequest() as stop:
        train_remaining_steps(run, LoggerGroup(), stop)
    resume_run(resumed)
    assert resumed.progress.step == 3 and resumed.last_validation == run.last_validation
    assert run.last_validation is not None and run.last_validation.step == 2
